from pyverbs.addr import AHAttr
from pyverbs.cq import CQ
from pyverbs.pd import PD
from pyverbs.wr import RecvWR, SendWR

class QPCap:
    def __init__(self, max_send_wr: int, max_recv_wr: int, max_send_sge: int, max_recv_sge: int) -> None: ...

class QPInitAttr:
    def __init__(self, qp_type: int, scq: CQ, rcq: CQ, cap: QPCap, sq_sig_all: int) -> None: ...

class QPAttr:
    pkey_index: int
    qp_access_flags: int
    ah_attr: AHAttr
    path_mtu: int
    dest_qp_num: int
    rq_psn: int
    sq_psn: int
    max_dest_rd_atomic: int
    max_rd_atomic: int
    min_rnr_timer: int
    timeout: int
    retry_cnt: int
    rnr_retry: int
    def __init__(self, qp_state: int, port_num: int = 1) -> None: ...

class QP:
    qp_num: int
    def __init__(self, creator: PD, init_attr: QPInitAttr) -> None: ...
    def modify(self, qp_attr: QPAttr, comp_mask: int) -> None: ...
    def post_send(self, wr: SendWR) -> None: ...
    def post_recv(self, wr: RecvWR) -> None: ...
    def close(self) -> None: ...
