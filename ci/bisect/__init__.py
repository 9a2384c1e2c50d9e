"""Finds where a case began to fail, or ceased to: over revisions, releases, wheels, versions of a compiler.

``search`` decides what to judge next and what may be said; it knows numbers alone. ``revisions``,
``releases`` and ``packages`` make the list of items, ``probe`` judges one, ``rule`` says what that means.
"""
