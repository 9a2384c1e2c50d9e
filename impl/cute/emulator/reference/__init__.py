"""The numpy engine: the readable statement of what the emulator's instructions and checks mean.

``engine.execute`` runs a launch. ``warp`` steps a warp, ``schedule`` decides who moves next, ``cta``
holds a block; ``elementwise``, ``memory``, ``collectives``, ``synchronisation``, ``copies``,
``tensor`` and ``wgmma`` say what each instruction does; ``clocks`` and ``shared`` find races.
"""
