from pyverbs.pd import PD

class MR:
    lkey: int
    rkey: int
    # Does not keep the memory at `address` alive.
    def __init__(self, creator: PD, length: int, access: int, address: int) -> None: ...
    def close(self) -> None: ...
