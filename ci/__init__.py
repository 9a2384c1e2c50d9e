"""The ``kdafuzz`` command and what it is made of.

Every process of the suite needs torch. It is loaded here, before another module asks for it, and
without a search for garbage: what it makes, some hundred thousand objects, stays to the end. Left
to itself Python would search them four hundred times meanwhile, then again and again, and once
more when the process ends: half of the processor time of a short process.
"""

import gc
from importlib import import_module

_collecting = gc.isenabled()
gc.disable()
import_module("torch")
gc.freeze()
if _collecting:
    gc.enable()
