"""The verbs that we use, under their own names: the one module that imports pyverbs (44 of Debian, 59 of PyPI), and that knows how they differ.

Each wrapper owns one object of the device; a failed call is a `VerbsError` that names it. The order in which things end is the caller's.

Never: waits, or holds memory that it did not get.
"""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, WC, CompChannel
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from transport.errors import VerbsError
from transport.rdma.devices import Gid, GidType, Link, PortFacts
from transport.rdma.wire import QueuePairAddress

try:
    from pyverbs import enums as e
except ImportError:  # pyverbs 59
    from pyverbs import libibverbs_enums as e  # type: ignore[no-redef]

SUCCESS = int(e.IBV_WC_SUCCESS)
RECEIVED_MESSAGE = int(e.IBV_WC_RECV)
RECEIVED_WRITE = int(e.IBV_WC_RECV_RDMA_WITH_IMM)

#: 4.096 us * 2^14 = 67 ms without an acknowledgement until a packet is sent again; after 6 repetitions, half a second, the peer counts as gone.
#: Not 7, the largest count: soft-RoCE takes it for "for ever" (seen: 286 repetitions in 19.5 s).
_ACK_TIMEOUT = 14
_NUM_RETRIES = 6
#: 0.64 ms until a sender tries again where no receive was posted; for ever (7), since the probes decide who is dead.
_RNR_TIMER = 12
_NUM_RNR_RETRIES = 7
#: More entries than a GID table has in practice; the call needs a bound.
_MAX_GIDS = 1024
_EVENT_FILE = "anon_inode:[infinibandevent]"

_GID_TYPES = {
    int(e.IBV_GID_TYPE_IB): GidType.INFINIBAND,
    int(e.IBV_GID_TYPE_ROCE_V1): GidType.ROCE_V1,
    int(e.IBV_GID_TYPE_ROCE_V2): GidType.ROCE_V2,
}
_STATES = {
    int(getattr(e, f"IBV_PORT_{name}")): name.lower()
    for name in ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")
}


def device_names() -> list[str]:
    """The RDMA devices of this machine, in the system's order."""
    try:
        return [_text(device.name) for device in get_device_list()]
    except PyverbsError:  # it also raises where there is none
        return []


class Device:
    """An open device."""

    def __init__(self, name: str) -> None:
        """Open it; `VerbsError` if it is not there or may not be opened."""
        self.name = name
        with _calling("ibv_open_device"):
            self.context = Context(name=name)

    def ports(self) -> list[PortFacts]:
        """What each port says of itself."""
        with _calling("ibv_query_device"):
            num_ports = self.context.query_device().phys_port_cnt
        return [self._port(port) for port in range(1, num_ports + 1)]

    def max_work_requests(self) -> int:
        """How many work requests a queue may hold, and how many entries a completion queue (the smaller of both)."""
        with _calling("ibv_query_device"):
            attributes = self.context.query_device()
        return min(attributes.max_qp_wr, attributes.max_cqe)

    def close(self) -> None:
        """Close it; everything that was made from it must be closed before."""
        with _calling("ibv_close_device"):
            self.context.close()

    def _port(self, port: int) -> PortFacts:
        with _calling("ibv_query_port"):
            facts = self.context.query_port(port)
        with _calling("ibv_query_gid_table"):
            entries = self.context.query_gid_table(_MAX_GIDS)
        gids = tuple(
            Gid(
                entry.gid_index,
                _gid_bytes(_text(entry.gid_str())),
                _GID_TYPES.get(int(entry.gid_type), GidType.ROCE_V1),
            )
            for entry in entries
            if entry.port_num == port
        )
        is_ethernet = facts.link_layer == e.IBV_LINK_LAYER_ETHERNET
        state = int(facts.state)
        return PortFacts(
            self.name,
            port,
            _STATES.get(state, f"state {state}"),
            state == e.IBV_PORT_ACTIVE,
            is_ethernet,
            facts.lid,
            facts.active_mtu,
            gids,
        )


class ProtectionDomain:
    """What its queue pairs may touch: its own regions and no others."""

    def __init__(self, device: Device) -> None:
        """Allocate it."""
        with _calling("ibv_alloc_pd"):
            self.domain = PD(device.context)

    def close(self) -> None:
        """Free it; its queue pairs and regions must be closed before."""
        with _calling("ibv_dealloc_pd"):
            self.domain.close()


class Region:
    """Registered memory. Only a region made with `is_remote_writable` has a key that a peer can use."""

    def __init__(self, domain: ProtectionDomain, memory: memoryview, *, is_remote_writable: bool) -> None:
        """Pin and register `memory`, which must stay until `close` has returned."""
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        access = e.IBV_ACCESS_LOCAL_WRITE | (e.IBV_ACCESS_REMOTE_WRITE if is_remote_writable else 0)
        with _calling(f"ibv_reg_mr of {len(memory)} bytes"):
            self._region = MR(domain.domain, len(memory), access, address=self.address)
        self.local_key = int(self._region.lkey)
        self.remote_key = int(self._region.rkey)

    def close(self) -> None:
        """Deregister: when this returns, no device reads or writes the memory."""
        with _calling("ibv_dereg_mr"):
            self._region.close()


class CompletionQueue:
    """Completions, with a descriptor that becomes readable when the next one is there."""

    def __init__(self, device: Device, num_entries: int) -> None:
        """Make queue and descriptor, armed."""
        before = _event_descriptors()
        with _calling("ibv_create_comp_channel"):
            self._channel = CompChannel(device.context)
        try:
            self.descriptor = _descriptor_of(self._channel, before)
            os.set_blocking(self.descriptor, False)
            with _calling(f"ibv_create_cq of {num_entries} entries"):
                self.queue = CQ(device.context, num_entries, channel=self._channel)
            # Not select(), which knows no descriptor beyond 1023.
            self._readiness = select.poll()
            self._readiness.register(self.descriptor, select.POLLIN)
            self._arm()
        except BaseException:
            self._channel.close()
            raise

    def take_event(self) -> bool:
        """Take the event that made the descriptor readable and arm for the next one; `False` if there was none. Then poll until empty."""
        # The call holds the interpreter's lock while it waits, so it is made only when there is something to take.
        if not self._readiness.poll(0):
            return False
        with _calling("ibv_get_cq_event"):
            self._channel.get_cq_event(self.queue)
        self.queue.ack_events(1)
        self._arm()
        return True

    def poll(self, max_completions: int) -> list[WC]:
        """At most so many completions, oldest first."""
        with _calling("ibv_poll_cq"):
            return list(self.queue.poll(max_completions)[1])

    def close(self) -> None:
        """Destroy both; the queue pairs that use it must be destroyed before."""
        with _calling("ibv_destroy_cq"):
            self.queue.close()
        with _calling("ibv_destroy_comp_channel"):
            self._channel.close()

    def _arm(self) -> None:
        with _calling("ibv_req_notify_cq"):
            self.queue.req_notify()


class QueuePair:
    """A reliable connected queue pair: a method for each of its transitions, and one for each kind of work."""

    def __init__(
        self, domain: ProtectionDomain, completions: CompletionQueue, num_sends: int, num_receives: int
    ) -> None:
        """Create it, in RESET."""
        capacity = QPCap(num_sends, num_receives, 1, 1)
        queue = completions.queue
        with _calling(f"ibv_create_qp for {num_sends} sends and {num_receives} receives"):
            self._pair = QP(
                domain.domain, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=queue, rcq=queue, cap=capacity, sq_sig_all=0)
            )
        self.number = int(self._pair.qp_num)

    def to_init(self, link: Link, *, may_be_written: bool) -> None:
        """RESET to INIT: receives may be posted. `may_be_written`: the peer may write into remote-writable regions of its domain."""
        attributes = QPAttr(qp_state=e.IBV_QPS_INIT, port_num=link.port)
        attributes.pkey_index = 0
        attributes.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE if may_be_written else 0
        mask = e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS
        self._modify("RESET->INIT", attributes, mask)

    def to_ready_to_receive(self, link: Link, peer: QueuePairAddress) -> None:
        """INIT to RTR: packets of this peer alone are accepted, from its first packet number on."""
        attributes = QPAttr(qp_state=e.IBV_QPS_RTR, port_num=link.port)
        with _calling("a route to the peer"):
            attributes.ah_attr = _route(link, peer)
        attributes.path_mtu = min(link.mtu, peer.mtu)
        attributes.dest_qp_num = peer.number
        attributes.rq_psn = peer.first_psn
        attributes.max_dest_rd_atomic = 0  # nobody reads
        attributes.min_rnr_timer = _RNR_TIMER
        mask = e.IBV_QP_STATE | e.IBV_QP_AV | e.IBV_QP_PATH_MTU | e.IBV_QP_DEST_QPN | e.IBV_QP_RQ_PSN
        self._modify("INIT->RTR", attributes, mask | e.IBV_QP_MAX_DEST_RD_ATOMIC | e.IBV_QP_MIN_RNR_TIMER)

    def to_ready_to_send(self, first_psn: int) -> None:
        """RTR to RTS: our packets begin with this number."""
        attributes = QPAttr(qp_state=e.IBV_QPS_RTS)
        attributes.sq_psn = first_psn
        attributes.timeout = _ACK_TIMEOUT
        attributes.retry_cnt = _NUM_RETRIES
        attributes.rnr_retry = _NUM_RNR_RETRIES
        attributes.max_rd_atomic = 0
        mask = e.IBV_QP_STATE | e.IBV_QP_SQ_PSN | e.IBV_QP_TIMEOUT | e.IBV_QP_RETRY_CNT
        self._modify("RTR->RTS", attributes, mask | e.IBV_QP_RNR_RETRY | e.IBV_QP_MAX_QP_RD_ATOMIC)

    def to_error(self) -> None:
        """Any state but RESET to ERR: no new work is executed in either direction. Packets may still land until `close` has returned."""
        self._modify("to ERR", QPAttr(qp_state=e.IBV_QPS_ERR), e.IBV_QP_STATE)

    def close(self) -> None:
        """Destroy it."""
        with _calling("ibv_destroy_qp"):
            self._pair.close()

    def post_receive(self, work: RecvWR) -> None:
        """Post one prepared receive."""
        with _calling("ibv_post_recv"):
            self._pair.post_recv(work)

    def post_send(self, work: SendWR) -> None:
        """Post one prepared write or message."""
        with _calling("ibv_post_send"):
            self._pair.post_send(work)

    def _modify(self, transition: str, attributes: QPAttr, mask: int) -> None:
        with _calling(f"ibv_modify_qp {transition}"):
            self._pair.modify(attributes, mask)


def receive_work(work_id: int, address: int, num_bytes: int, local_key: int) -> RecvWR:
    """A receive into `num_bytes` at `address`; it may be posted again and again."""
    return RecvWR(wr_id=work_id, num_sge=1, sg=[SGE(address, num_bytes, local_key)])


def message_work(work_id: int, address: int, num_bytes: int, local_key: int) -> SendWR:
    """A signalled SEND of `num_bytes` at `address`; it may be posted again and again."""
    return SendWR(
        wr_id=work_id,
        opcode=e.IBV_WR_SEND,
        num_sge=1,
        sg=[SGE(address, num_bytes, local_key)],
        send_flags=e.IBV_SEND_SIGNALED,
    )


def write_work(
    work_id: int, source: tuple[int, int, int], target: tuple[int, int], immediate: int, *, is_signalled: bool
) -> SendWR:
    """A WRITE with immediate from (address, num_bytes, local key) to (address, remote key)."""
    work = SendWR(
        wr_id=work_id,
        opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM,
        num_sge=1,
        sg=[SGE(*source)],
        imm_data=immediate,
        send_flags=e.IBV_SEND_SIGNALED if is_signalled else 0,
    )
    address, remote_key = target
    work.set_wr_rdma(remote_key, address)
    return work


def status_name(status: int) -> str:
    """`REM_ACCESS_ERR` for 10."""
    names = [name for name in dir(e) if name.startswith("IBV_WC_") and name.endswith(("_ERR", "SUCCESS"))]
    return next((name.removeprefix("IBV_WC_") for name in names if int(getattr(e, name)) == status), f"status {status}")


def _route(link: Link, peer: QueuePairAddress) -> AHAttr:
    if link.gid is None or peer.gid is None:
        return AHAttr(dlid=peer.lid, port_num=link.port, is_global=0)
    route = GlobalRoute(dgid=GID(_gid_text(peer.gid)), sgid_index=link.gid.index, hop_limit=64)
    return AHAttr(dlid=peer.lid, gr=route, is_global=1, port_num=link.port)


def _gid_bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def _gid_text(gid: bytes) -> str:
    return gid.hex(":", 2)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _event_descriptors() -> set[int]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            is_event = str(entry.readlink()) == _EVENT_FILE
        except OSError:  # the descriptor of this listing itself
            continue
        if is_event:
            found.add(int(entry.name))
    return found


def _descriptor_of(channel: CompChannel, before: set[int]) -> int:
    """pyverbs 59 tells the descriptor; of 44 it is the one that was not there before."""
    told = getattr(channel, "fd", None)
    if told is not None:
        return int(told)
    new = _event_descriptors() - before
    if len(new) != 1:
        raise VerbsError(f"ibv_create_comp_channel: {len(new)} new event descriptors where one was due")
    return new.pop()


@contextmanager
def _calling(call: str) -> Iterator[None]:
    try:
        yield
    except PyverbsRDMAError as error:
        code = error.error_code
        raise VerbsError(f"{call}: {os.strerror(code) if code > 0 else error}") from error
    except PyverbsError as error:
        raise VerbsError(f"{call}: {error}") from error
