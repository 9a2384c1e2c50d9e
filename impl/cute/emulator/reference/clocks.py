"""Vector clocks: what every warp knows to have happened.

An *entity* is a source of events: accesses of a warp, copies that complete on one mbarrier, the
tensor core. Its counter numbers its events; a warp's vector holds, per entity, up to which event
it is ordered after. Two accesses conflict unless the later one's vector covers the earlier one.

With W warps the entities are, by index:

* ``w``: generic accesses of warp w (its counter grows whenever something orders them)
* ``proxy(w)``: how many of those a proxy fence has made visible to asynchronous reads
* ``loads(w)``: tensor-memory loads, ``stores(w)``: bulk stores, ``products(w)``: wgmma,
  ``copies(w)``: cp.async of warp w
* ``tensor``: tcgen05.mma and commit of the CTA
* ``dependency``: 1 once griddepcontrol.wait was executed
* ``copies_on(address)``: copies that complete on the mbarrier there
"""

import numpy as np

from impl.cute.emulator.errors import EmulatorError

COPY_MBARRIERS = 64
"""Most mbarriers of a CTA that copies can complete on."""


class Clocks:
    """The vectors of a CTA with ``warps`` warps, [warps, entities] u4.

    ``known`` orders accesses to shared memory; ``tensor_known`` those to tensor memory, which only the
    tcgen05 fences connect to the former.
    """

    def __init__(self, warps: int) -> None:
        self.warps = warps
        self.tensor, self.dependency = 6 * warps, 6 * warps + 1
        self.entities = 6 * warps + 2 + COPY_MBARRIERS
        self.known = np.zeros((warps, self.entities), np.uint32)
        self.tensor_known = np.zeros_like(self.known)
        self.counter = np.ones(self.entities, np.uint32)
        self._mbarriers: dict[int, int] = {}

    def proxy(self, warp: int) -> int:
        """Entity: writes of a warp visible to the async proxy."""
        return self.warps + warp

    def loads(self, warp: int) -> int:
        """Entity: tensor-memory loads of a warp."""
        return 2 * self.warps + warp

    def stores(self, warp: int) -> int:
        """Entity: bulk stores that a warp issued."""
        return 3 * self.warps + warp

    def products(self, warp: int) -> int:
        """Entity: wgmma of a warp."""
        return 4 * self.warps + warp

    def copies(self, warp: int) -> int:
        """Entity: cp.async of a warp."""
        return 5 * self.warps + warp

    def copies_on(self, address: int) -> int:
        """Entity: copies that complete on the mbarrier at that shared address."""
        if address not in self._mbarriers:
            if len(self._mbarriers) == COPY_MBARRIERS:
                raise EmulatorError(
                    "unsupported", f"copies completing on more than {COPY_MBARRIERS} mbarriers"
                )
            self._mbarriers[address] = 6 * self.warps + 2 + len(self._mbarriers)
        return self._mbarriers[address]

    def nothing(self) -> np.ndarray:
        """A vector that covers no event."""
        return np.zeros(self.entities, np.uint32)

    def snapshot(self, warp: int) -> np.ndarray:
        """What happened before this point of the warp, its own accesses included.

        Its later accesses are new events.
        """
        vector: np.ndarray = self.known[warp].copy()
        vector[warp] = self.counter[warp]
        self.counter[warp] += 1
        return vector

    def acquire(self, warp: int, vector: np.ndarray) -> None:
        """The warp is ordered after all that the vector covers."""
        np.maximum(self.known[warp], vector, out=self.known[warp])

    def learn(self, warp: int, entity: int, clock: int) -> None:
        """The warp is ordered after that event."""
        self.known[warp, entity] = max(self.known[warp, entity], clock)

    def tick(self, entity: int) -> int:
        """The number of a new event."""
        clock = int(self.counter[entity])
        self.counter[entity] += 1
        return clock

    def fence_proxy(self, warp: int) -> None:
        """All generic writes that the warp knows of become visible to asynchronous reads ordered after it."""
        generic = slice(0, self.warps)
        known = self.known[warp]
        seen = known[generic].copy()
        seen[warp] = self.counter[warp]
        proxies = known[self.warps : 2 * self.warps]
        np.maximum(proxies, seen, out=proxies)
        self.counter[warp] += 1

    def name(self, entity: int) -> str:
        """An entity in words, for error texts."""
        loads, stores = "a tensor-memory load of warp {}", "a bulk store of warp {}"
        kinds = ("warp {}", "", loads, stores, "wgmma of warp {}", "cp.async of warp {}")
        if entity < self.tensor:
            return kinds[entity // self.warps].format(entity % self.warps)
        if entity == self.tensor:
            return "tcgen05.mma"
        address = next(a for a, e in self._mbarriers.items() if e == entity)
        return f"a copy that completes on the mbarrier at {address:#x}"
