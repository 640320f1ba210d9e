"""The memory of a private pool: layer-major, one tensor for each array of each layer.

On the CPU the bytes of the tensors are read and written in place. On another device a block goes through a private
staging buffer in host memory, where it is verified before it moves.

Never: gives its memory to a transport, or knows which of its slots are proven.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from kvlease.kvcache.canonical import HostWindow, SlotRun, WirePlan, copy_out, slot_runs
from kvlease.kvcache.layout import Layout, check_block_size

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVStorage:
    """`num_blocks` blocks of `block_size` token slots, zero at first."""

    def __init__(
        self, layout: Layout, num_blocks: int, block_size: int, device: str = "cpu", *, staged: bool | None = None
    ) -> None:
        """Allocate the pool. `staged`: go through host staging buffers; by default if the device is not the CPU."""
        check_block_size(block_size)
        if num_blocks <= 0:
            raise ValueError(f"a storage needs blocks, got {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = torch.device(device)
        self._arrays = {
            (index, spec.name): torch.zeros(
                (num_blocks, block_size, *spec.shape), dtype=_DTYPES[spec.dtype], device=self.device
            )
            for index, layer in enumerate(layout.layers)
            for spec in layer
        }
        self._slots = tuple(
            array.view(num_blocks * block_size, -1).view(torch.uint8) for array in self._arrays.values()
        )  # of each array, in canonical order: [num_slots, token_bytes]
        is_staged = self.device.type != "cpu" if staged is None else staged
        self._host = None if is_staged else tuple(slots.view(-1).numpy().data for slots in self._slots)
        self._plans: dict[int, WirePlan] = {}

    @property
    def pool_bytes(self) -> int:
        """Memory of the whole pool."""
        return self.num_blocks * self.block_size * self.layout.token_bytes

    @property
    def is_on_host(self) -> bool:
        """Whether blocks are copied straight into and out of the pool, without a staging buffer and a device."""
        return self._host is not None

    def array(self, layer: int, name: str) -> torch.Tensor:
        """`[num_blocks, block_size, *shape]`, the memory itself."""
        return self._arrays[layer, name]

    def scrub(self, blocks: Iterable[int]) -> None:
        """Zero whole blocks, so that nothing an earlier sequence left can be read, masked or not."""
        ordered = sorted(set(blocks))
        if not ordered:
            return
        runs = slot_runs(ordered, self.block_size, 0, len(ordered) * self.block_size)
        self._check_runs(runs)
        for slots in self._slots:
            for run in runs:
                slots[run.first_slot : run.first_slot + run.num_slots].zero_()

    def copy_block(self, source: int, target: int) -> None:
        """All slots of one block into another."""
        size = self.block_size
        self._check_runs((SlotRun(source * size, size), SlotRun(target * size, size)))
        for slots in self._slots:
            slots[target * size : (target + 1) * size] = slots[source * size : (source + 1) * size]

    def plan(self, wire_block_size: int) -> WirePlan:
        """How a canonical block of this size is copied."""
        plan = self._plans.get(wire_block_size)
        if plan is None:
            plan = self._plans[wire_block_size] = WirePlan.of(self.layout, wire_block_size)
        return plan

    def read_canonical(
        self, table: Sequence[int], first_position: int, num_tokens: int, wire_block_size: int | None = None
    ) -> bytearray:
        """The canonical block of these tokens, for comparisons; `wire_block_size` is `num_tokens` by default."""
        plan = WirePlan.of(self.layout, wire_block_size or num_tokens)
        content = bytearray(plan.content_bytes)
        window = self.read_window(slot_runs(table, self.block_size, first_position, num_tokens))
        copy_out(plan, window, memoryview(content))
        return content

    def read_window(self, runs: tuple[SlotRun, ...]) -> HostWindow:
        """Host memory with what these slots hold: the pool itself, or a copy brought from the device in one step."""
        self._check_runs(runs)
        if self._host is not None:
            return HostWindow(self._host, runs)
        parts = [
            slots[run.first_slot : run.first_slot + run.num_slots].flatten() for slots in self._slots for run in runs
        ]
        return self._staged_window(runs, bytearray(torch.cat(parts).cpu().numpy()))

    def write_window(self, runs: tuple[SlotRun, ...]) -> HostWindow:
        """Host memory to copy into; what is written there is in the pool at the latest after `settle`."""
        self._check_runs(runs)
        if self._host is not None:
            return HostWindow(self._host, runs)
        num_slots = sum(run.num_slots for run in runs)
        return self._staged_window(runs, bytearray(num_slots * self.layout.token_bytes))

    def settle(self, window: HostWindow, runs: tuple[SlotRun, ...]) -> None:
        """Move a staging buffer to the slots that it was opened for. The engine must compute on the current stream."""
        if window.staging is None:
            return
        moved, cursor = torch.frombuffer(window.staging, dtype=torch.uint8).to(self.device), 0
        for slots in self._slots:
            for run in runs:
                target = slots[run.first_slot : run.first_slot + run.num_slots]
                target.copy_(moved[cursor : cursor + target.numel()].view_as(target))
                cursor += target.numel()

    def _staged_window(self, runs: tuple[SlotRun, ...], staging: bytearray) -> HostWindow:
        num_slots = sum(run.num_slots for run in runs)
        whole, arrays, cursor = memoryview(staging), [], 0
        for slots in self._slots:
            num_bytes = num_slots * slots.shape[1]
            arrays.append(whole[cursor : cursor + num_bytes])
            cursor += num_bytes
        return HostWindow(tuple(arrays), (SlotRun(0, num_slots),), staging)

    def _check_runs(self, runs: tuple[SlotRun, ...]) -> None:
        """A slice beyond the end would silently be a shorter one."""
        for run in runs:
            end = run.first_slot + run.num_slots
            assert 0 <= run.first_slot < end <= self.num_blocks * self.block_size, (
                f"{run} lies outside {self.num_blocks} blocks of {self.block_size} tokens"
            )
