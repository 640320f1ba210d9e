"""`kvlease bench transfer` as a user runs it: two processes, real sockets, small sizes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvlease.bench.errors import BenchFailed
from kvlease.bench.transfer.plan import SEAL_BYTES, BlockShape, TransferPlan, order_of
from kvlease.bench.transfer.sealed_source import SealedSource
from kvlease.bench.transfer.sealed_target import VerifyingTarget
from kvlease.cli.bench import size_bytes
from kvlease.cli.main import main
from kvlease.kvcache import seal
from transport.contract import RingGeometry
from transport.memory import FaultPlan, MemoryHub, MemoryTransport

ROOT = Path(__file__).parents[2]
SMALL = (
    "--block-bytes",
    "16KiB",
    "--total-bytes",
    "1MiB",
    "--ring-bytes",
    "256KiB",
    "--rounds",
    "2",
    "--latencies",
    "5",
)
Row = dict[str, object]


def measured(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Row]:
    """Rows by name, of order consecutive where there are two."""
    assert main(["bench", "transfer", "--json", *SMALL, *flags]) == 0
    rows = json.loads(capsys.readouterr().out)["figures"]
    return {str(row["name"]): row for row in rows if row.get("order", "consecutive") == "consecutive"}


def test_a_bare_transport_is_measured_between_two_processes(capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured(capsys, "--no-verify")
    assert set(rows) == {
        *("copy", "stream", "stream cpu", "stream one block", "bare", "bare cpu", "bare to stream", "bare one block")
    }
    assert all(isinstance(row["median"], float) and row["median"] > 0 for row in rows.values())
    assert (rows["bare"]["samples"], rows["bare one block"]["samples"]) == (2, 5)


@pytest.mark.parametrize("transport", ["tcp", "memory"])
def test_the_shipped_path_is_measured_beside_it(capsys: pytest.CaptureFixture[str], transport: str) -> None:
    rows = measured(capsys, "--transport", transport)
    assert {"bare", "bare one block", "verified", "verified cpu", "verified one block"} <= set(rows)
    assert (rows["verified"]["samples"], rows["verified one block"]["samples"]) == (2, 5)
    assert ("verified to stream" in rows) == (transport == "tcp")


def test_an_engine_decodes_beside_the_receiver(capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured(capsys, "--busy", "tiny")
    assert {"decode step alone", "decode step beside"} <= set(rows)
    assert all(rows[f"decode step {when}"]["median"] > 0 for when in ("alone", "beside"))  # type: ignore[operator]
    assert rows["verified"]["engine"] == "8 streams"  # the later of two rows of one name


def test_a_block_that_is_refused_spoils_the_measurement() -> None:
    async def flipped() -> None:
        target = VerifyingTarget(BlockShape(16 << 10, 4), 2)
        hub = MemoryTransport(MemoryHub(FaultPlan(stray_rate=1.0)))
        end = await hub.open_landing(RingGeometry((16 << 10) + SEAL_BYTES, 2))
        departure, answer = await hub.open_departure(RingGeometry((16 << 10) + SEAL_BYTES, 2), end.offer)
        await end.establish(answer)
        source = SealedSource(BlockShape(16 << 10, 4), 2)
        source.start(departure)
        try:
            await target.expect(2, "random", 1, await source.prepare(2, "random", 1))
            taking = asyncio.create_task(target.take(end))
            await source.send(2)
            await taking
        finally:
            target.close()
            await source.close()
            await departure.close()
            await end.close()

    with pytest.raises(BenchFailed, match="refused"):
        asyncio.run(flipped())


def test_memory_is_measured_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured(capsys, "--no-verify", "--transport", "memory")
    assert set(rows) == {"copy", "bare", "bare cpu", "bare one block"}


def test_a_bare_measurement_needs_the_standard_library_alone() -> None:
    flags = ["bench", "transfer", "--no-verify", "--transport", "memory", *SMALL]
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from kvlease.cli.main import main; sys.exit(main({flags}))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "bare one block" in done.stdout


def test_what_cannot_be_measured_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (("--block-bytes", "100"), ("--rounds", "0"), ("--total-bytes", "1KiB"), ("--transport", "pigeon")):
        assert main(["bench", "transfer", *SMALL, "--no-verify", *flags]) == 2
        output = capsys.readouterr()
        assert (output.out, output.err.count("\n")) == ("", 1)


def test_the_seal_is_as_long_as_the_plan_says() -> None:
    assert SEAL_BYTES == seal.SEAL_BYTES


def test_an_order_has_every_block_once_and_a_seed_gives_it_again() -> None:
    assert order_of(50, "consecutive", 3) == list(range(50))
    assert sorted(order_of(50, "random", 3)) == list(range(50))
    assert order_of(50, "random", 3) == order_of(50, "random", 3) != order_of(50, "random", 4)


def test_a_ring_has_two_slots_at_least() -> None:
    plan = TransferPlan(ring_bytes=1 << 20)
    assert plan.geometry(1 << 20, is_sealed=True).num_slots == 2
    assert plan.geometry(16 << 10, is_sealed=False).num_slots == 64


def test_sizes_are_read_as_they_are_written() -> None:
    assert [size_bytes(text) for text in ("64KiB", "1MiB", "512", "2g")] == [65536, 1 << 20, 512, 2 << 30]
