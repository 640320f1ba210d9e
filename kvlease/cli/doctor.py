"""`kvlease doctor`: what stands between this machine and RDMA, line by line, and what to do about it.

    kvlease doctor                            this machine, ending with blocks between two processes of it
    kvlease doctor --listen --host HOST       answers the other machine's probes
    kvlease doctor --peer HOST:PORT           the same as the first, then blocks from that machine, with their speed

Never: changes anything; needs a model or a running cluster.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvlease.cli.configs import refuse_missing_rdma, take_secret
from kvlease.cli.errors import ConfigurationError
from kvlease.cli.limits import Limits
from kvlease.cli.options import SECRET_VARIABLE, Invocation
from kvlease.cli.settings import ENV_PREFIX
from kvlease.peering.hosting import until_signal
from kvlease.peering.probe import ProbeFailed, answer_probes, probe
from transport.contract import Transport
from transport.errors import TransportRefused
from transport.rdma import DeviceChoice, open_rdma, self_test
from transport.rdma.inspection import Finding, look_at_files, look_at_library, look_at_memory, look_at_ports

if TYPE_CHECKING:
    from transport.rdma.transport import RdmaTransport

LISTENING = "kvlease doctor is listening: "
_LOOPBACK = "127.0.0.1"
#: For the second process to listen, or to end: it loads gRPC and tests nothing.
_START_S = 60.0
_AUTHENTICATION_ADVICE = "give both ends the same --secret-file"
_PATH_ADVICE = "see that both ends are in one routed network, and that firewalls let UDP port 4791 (RoCE v2) through"


@dataclass(frozen=True, slots=True)
class Visit:
    """What the doctor is asked to look at."""

    choice: DeviceChoice
    ring_bytes: int
    peer: str = ""
    secret: str = ""


def run_doctor(invocation: Invocation, environ: MutableMapping[str, str]) -> int:
    """Look and print what was found, or listen. Returns 0 if blocks can travel by RDMA, else 1; raises ConfigurationError."""
    settings = invocation.settings
    try:
        choice = DeviceChoice.parse(settings.rdma_device)
    except ValueError as error:
        raise ConfigurationError(f"--rdma-device: {error}") from None
    if invocation.listen and (settings.peer or invocation.json):
        raise ConfigurationError("--listen answers probes and looks at nothing: leave out --peer and --json")
    secret = take_secret(settings, environ, Limits()) if invocation.listen or settings.peer else ""
    if invocation.listen:
        refuse_missing_rdma(settings.rdma_device)
        asyncio.run(_listen(choice, secret, settings.host, settings.port or 0))
        return 0
    findings = asyncio.run(look(Visit(choice, int(settings.ring_bytes), settings.peer, secret)))
    sys.stdout.write(to_json(findings) if invocation.json else to_lines(findings))
    return 1 if any(finding.state == "fault" for finding in findings) else 0


async def look(visit: Visit) -> list[Finding]:
    """Everything, in order; what cannot be looked at any more is said to be skipped."""
    findings = [*look_at_files(), look_at_library()]
    if findings[-1].state == "fault":
        return [*findings, look_at_memory(visit.ring_bytes), *_skipped(visit)]
    ports, link = look_at_ports(visit.choice)
    findings += [*ports, look_at_memory(visit.ring_bytes)]
    if link is None:
        return [*findings, *_skipped(visit)]
    try:
        transport = open_rdma(visit.choice)
    except TransportRefused as error:
        return [*findings, Finding("device", "fault", str(error), "see the lines above"), *_skipped(visit)]
    try:
        findings += await _self_test(transport)
        findings.append(await _local_path(visit, transport))
        if visit.peer:
            findings.append(await _path("peer", visit.peer, visit.secret, transport))
    finally:
        await transport.close()
    return findings


def to_lines(findings: Sequence[Finding]) -> str:
    """A line each, and below a fault what to do."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<8}{finding.subject:<{width + 2}}{finding.text}")
        if finding.advice:
            lines.append(f"{'':<8}{'':<{width + 2}}-> {finding.advice}")
    return "\n".join(lines) + "\n"


def to_json(findings: Sequence[Finding]) -> str:
    """For programs."""
    is_well = not any(finding.state == "fault" for finding in findings)
    return json.dumps({"rdma": is_well, "findings": [asdict(finding) for finding in findings]}, indent=2) + "\n"


async def _self_test(transport: RdmaTransport) -> list[Finding]:
    advice = "do not use this device: --transport tcp"
    return [
        Finding("self-test", "ok", f"{check.fact} ({check.seconds * 1000:.0f} ms)")
        if check.fault is None
        else Finding("self-test", "fault", f"not seen that {check.fact}: {check.fault}", advice)
        for check in await self_test(transport)
    ]


async def _local_path(visit: Visit, transport: Transport) -> Finding:
    """From a second process of this machine, under a secret of its own."""
    secret = secrets.token_hex(16)
    try:
        async with _second_process(visit.choice, secret) as address:
            return await _path("two local processes", address, secret, transport)
    except ProbeFailed as error:
        return Finding("two local processes", "fault", str(error), "see its lines above")
    except TimeoutError:
        text = f"the second process did not listen within {_START_S:g} s"
        return Finding("two local processes", "fault", text, "see whether opening the device hangs: ibv_devinfo")


async def _path(subject: str, address: str, secret: str, transport: Transport) -> Finding:
    try:
        result = await probe(address, secret, transport)
    except ProbeFailed as error:
        advice = _AUTHENTICATION_ADVICE if "UNAUTHENTICATED" in str(error) else _PATH_ADVICE
        return Finding(subject, "fault", str(error), advice)
    text = f"{result.num_blocks} blocks came whole and in order, {result.bytes_per_s / 1e6:.1f} MB/s"
    return Finding(subject, "ok", text)


@asynccontextmanager
async def _second_process(choice: DeviceChoice, secret: str) -> AsyncIterator[str]:
    """`kvlease doctor --listen` on a free port; its address."""
    device = () if choice.device is None else ("--rdma-device", str(choice))
    command = (sys.executable, "-P", "-m", "kvlease", "doctor", "--listen", "--host", _LOOPBACK, "--port", "0", *device)
    # None of our own variables: a file of the cluster's secret would win over the one that this check is made with.
    foreign = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
    process = await asyncio.create_subprocess_exec(
        *command, env={**foreign, SECRET_VARIABLE: secret}, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), _START_S)).decode().strip()
        if not line.startswith(LISTENING):
            raise ProbeFailed("the second process ended before it listened")
        yield line.removeprefix(LISTENING)
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _START_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _listen(choice: DeviceChoice, secret: str, host: str, port: int) -> None:
    transport = open_rdma(choice)
    try:
        server, address = await answer_probes(transport, secret, host, port)
        print(f"{LISTENING}{address}", flush=True)
        await until_signal()
        await server.stop(0)
    finally:
        await transport.close()


def _skipped(visit: Visit) -> list[Finding]:
    subjects = ["self-test", "two local processes", *(["peer"] if visit.peer else [])]
    return [Finding(subject, "skipped", "there is no device to try it on") for subject in subjects]
