"""An emulator of the PTX that the CuTe DSL compiles kernels to, for sm_90a and sm_100a.

``parse`` reads the text, ``program`` lowers it to the instructions of ``isa``, ``run`` executes
a launch on one of two engines that agree bit for bit: ``native`` (C++) and ``reference``
(numpy). ``host`` lets the kernels' own host code launch it.
"""
