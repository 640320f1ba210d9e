class Device:
    name: bytes | str

class DeviceAttr:
    phys_port_cnt: int
    max_qp_wr: int
    max_cqe: int

class PortAttr:
    state: int
    link_layer: int
    active_mtu: int
    lid: int

class GIDEntry:
    gid_index: int
    port_num: int
    gid_type: int
    def gid_str(self) -> str | bytes: ...

class Context:
    def __init__(self, *, name: str) -> None: ...
    def query_device(self) -> DeviceAttr: ...
    def query_port(self, port_num: int) -> PortAttr: ...
    def query_gid_table(self, max_entries: int) -> list[GIDEntry]: ...
    def close(self) -> None: ...

def get_device_list() -> list[Device]: ...
