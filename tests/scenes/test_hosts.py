"""Jobs on several hosts: trust and addresses made by attach, ways in from elsewhere."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.hosts import SECOND, Host, hosts, wait_until
from tests.launch import ROOT
from tests.longer import sample
from tests.needs import program

NUMEL = 1 << 21

SLACK_S = 3.0
"""For a busy machine; what is refused is refused after 5 s at most."""

PARAMD = [sys.executable, "-m", "paramd.cli"]
FAR_TRAINER = "tests.integration.far_trainer"

SUMMON = """
import paramd
with paramd.connect(job="far") as mesh:
    found = mesh.summon("*")["0.weight"]
    print(found.numel(), sorted(found.unique().tolist()), [lane.transport for lane in mesh.lanes()])
    print([row.reason for row in mesh.status()])
"""


@dataclass
class Training:
    """A training on hosts, started by torchrun on each."""

    folder: Path
    hosts: Sequence[Host]
    port: int = 29500
    started: int = 0
    processes: Sequence[subprocess.Popen[bytes]] = ()
    arguments: Sequence[str] = ()
    """Of the script, after the stop file."""
    ranks: int = 1
    """On each host."""

    def start(self, *, env: Sequence[dict[str, str]] = ()) -> None:
        """Start it; `env` is what each host adds to the environment."""
        self.started += 1
        launch = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(self.hosts)),
            "--nproc-per-node", str(self.ranks), "--master-addr", self.hosts[0].ip,
            "--master-port", str(self.port + self.started),
        ]  # fmt: skip
        script = ["-m", FAR_TRAINER, str(self.stop_file)]
        script += self.arguments
        self.processes = [
            host.start(
                [*launch, "--node-rank", str(number), *script],
                output=self.output(number),
                env=env[number] if env else None,
            )
            for number, host in enumerate(self.hosts)
        ]

    @property
    def stop_file(self) -> Path:
        return self.folder / f"stop-{self.started}"

    def output(self, number: int) -> Path:
        return self.folder / f"out-{self.started}-{number}"

    def told(self) -> str:
        """What all hosts printed."""
        return "\n".join(self.output(n).read_text() for n in range(len(self.hosts)))

    def wait_attached(self) -> dict[str, Any]:
        """Its endpoint, once it trains."""

        def attached() -> bool:
            assert all(p.poll() is None for p in self.processes), self.told()
            return "attached" in self.output(0).read_text()

        wait_until("attached", attached, timeout_s=120.0, told=self.told)
        told = self.hosts[0].run(["cat", str(self.hosts[0].folder / "state/far/endpoint.json")])
        found: dict[str, Any] = json.loads(told.stdout)
        return found

    def stop(self) -> None:
        """End it in good order."""
        self.stop_file.touch()
        for process in self.processes:
            assert process.wait(60.0) == 0, self.told()


@contextmanager
def training(
    count: int, folder: Path, *, second: bool = False, ipv6: bool = False
) -> Iterator[tuple[Training, Host]]:
    """That many hosts that train, and one more that looks; the options are those of `hosts`."""
    with hosts(count + 1, folder, second=second, ipv6=ipv6) as found:
        made = Training(folder, found[:-1])
        try:
            yield made, found[-1]
        finally:
            for process in made.processes:
                process.kill()
                process.wait()


def client_env(endpoint: dict[str, Any], **more: str) -> dict[str, str]:
    """What somebody on another host is given: URL, token, fingerprint."""
    named = {"PARAMD_URL": endpoint["url"], "PARAMD_TLS_CA": endpoint["ca_pin"]}
    return named | {"PARAMD_TOKEN": endpoint["token"]} | more


def check_summon(host: Host, env: dict[str, str] | None, transports: list[str]) -> None:
    """All bytes are there and of the right ranks."""
    said = host.python(SUMMON, env=env).splitlines()
    assert said[0] == f"{NUMEL} [1.0, 2.0] {transports}", said
    assert said[1] == "['', '']", said


def key_text_on(host: Host, folder: Path) -> list[str]:
    """Where there is a private key on the host: files, arguments, environments."""
    found = host.run(["grep", "-rl", "PRIVATE KEY", str(host.folder)], check=False).stdout.split()
    for process in psutil.process_iter():
        with process.oneshot():
            try:
                words = [*process.cmdline(), *process.environ().values()]
            except psutil.Error:
                continue
        found += [str(process.pid) for word in words if "PRIVATE KEY" in word and folder]
    return found


@pytest.mark.timeout(300)
def test_a_job_on_two_hosts_makes_its_own_tls_and_is_read_from_everywhere(tmp_path: Path) -> None:
    with training(2, tmp_path) as (job, login):
        one, two = job.hosts
        job.start()
        endpoint = job.wait_attached()
        assert endpoint["url"] == f"https://{one.ip}:8470"
        assert re.fullmatch(r"sha256:[0-9a-f]{64}", endpoint["ca_pin"])
        # The chosen addresses are printed, once.
        assert job.told().count("paramd: job 'far' is at https://10.77.0.1:8470") == 1
        assert f"h2 {two.ip} (from the route to MASTER_ADDR" in job.told()
        assert key_text_on(one, tmp_path) == key_text_on(two, tmp_path) == []
        # The first host knows the job by its state dir, the others by what they are given.
        check_summon(one, None, ["same-host", "stream"])
        env = client_env(endpoint)
        check_summon(two, env, ["stream", "same-host"])
        check_summon(login, env, ["stream", "stream"])
        # Whoever reaches nothing but the control plane's port gets the same bytes.
        login.run(["ip", "route", "add", "blackhole", f"{two.ip}/32"])
        check_summon(login, env, ["stream", "grpc"])
        doctor = login.run([*PARAMD, "doctor", "--job", "far"], env=env, check=False).stdout
        assert "through the control plane" in " ".join(doctor.split()), doctor
        assert "issued by paramd job far" in " ".join(doctor.split()), doctor
        # Strangers get nothing: another CA's fingerprint, no certificate of the job, no TLS.
        wrong = client_env(endpoint, PARAMD_TLS_CA="sha256:" + "0" * 64)
        refused = login.run([*PARAMD, "status", "--job", "far"], env=wrong, check=False)
        assert refused.returncode == 2
        assert "has another CA" in refused.stderr
        plain = client_env(endpoint, PARAMD_URL=endpoint["url"].replace("https", "http"))
        refused = login.run([*PARAMD, "status", "--job", "far"], env=plain, check=False)
        assert "not https" in refused.stderr, refused
        address = endpoint["grpc_address"].removeprefix("mtls://")
        for command in (["-CAfile", "/dev/null"], []):
            said = login.run(
                ["timeout", "5", "openssl", "s_client", "-connect", address, *command], check=False
            )
            assert "HTTP/2" not in said.stdout
        job.stop()


READ_AND_EDIT = """
import sys, paramd
with paramd.connect(job="far") as mesh:
    print(*sorted({one.address for one in mesh.reaches()}), flush=True)
    for line in sys.stdin:
        try:
            if line != "read\\n":
                mesh.edit("0.weight[0:1]", fill=float(line))
            found = mesh.summon("*")["0.weight"]
            print(*found[:1].unique().tolist(), *sorted(found[1:].unique().tolist()), flush=True)
        except paramd.errors.ParamdError as error:
            print(repr(error), flush=True)
"""


def shown(host: Host, addresses: Sequence[str]) -> list[str]:
    """The certificates that servers show to a new connection from there."""
    places = [address.rpartition("://")[2].rsplit(":", 1) for address in addresses]
    told = host.python(
        "import json, ssl\n"
        f"print(json.dumps([ssl.get_server_certificate((h, int(p))) for h, p in {places}]))"
    )
    found: list[str] = json.loads(told)
    return found


def kill(folder: Path, *words: str) -> None:
    """Kill the processes on all hosts that have these words as arguments."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            here = process.environ().get("HOME") == str(folder)
            if here and set(words) <= set(process.cmdline()):
                process.kill()


@pytest.mark.timeout(300)
def test_a_job_is_read_and_edited_over_its_own_tls_with_another_sidecar_and_with_rank_0_gone(
    tmp_path: Path,
) -> None:
    """Its hosts have two links, of which the process group is told to use the second."""
    with training(2, tmp_path, second=True) as (job, login), ExitStack() as stack:
        one, two = job.hosts
        env = {"GLOO_SOCKET_IFNAME": "eth1"}
        job.start(env=[env, env])
        endpoint = job.wait_attached()
        assert endpoint["url"] == f"https://{one.second_ip}:8470"
        assert f"h2 {two.second_ip} (from GLOO_SOCKET_IFNAME" in job.told()
        ask = stack.enter_context(login.conversation(READ_AND_EDIT, client_env(endpoint)))
        addresses = [endpoint["url"], *ask().split()]
        assert len(addresses) == 4, "REST and gRPC of the control plane, two sidecars"
        assert all(f"//{SECOND}." in address for address in addresses), addresses
        edits, told = 0, ""

        def is_right() -> bool:
            nonlocal edits, told
            edits += 1
            told = ask(str(edits))
            return told == f"{edits}.0 1.0 2.0"

        assert len(set(shown(login, addresses))) == 3, "of the control plane, and of each rank"
        assert is_right(), told
        kill(two.folder, "paramd_service.sidecar", "--rank", "1")
        wait_until("right with another sidecar", is_right, timeout_s=60.0, told=lambda: told)
        assert key_text_on(one, tmp_path) == key_text_on(two, tmp_path) == []
        # Only the other rank's host is left.
        login.run([*PARAMD, "pause", "--job", "far"], env=client_env(endpoint))
        for name in (FAR_TRAINER, "paramd_service.control"):
            kill(one.folder, name)
        told = ask("read")
        assert told == f"{edits}.0 1.0 2.0"


WRONG: dict[str, tuple[dict[str, str], list[str]]] = {
    "address": ({"PARAMD_ADDRESS": "10.99.0.1"}, ["rank 1 on host h2", "no address of this host"]),
    "tls": ({"PARAMD_TLS_CERT": "/x"}, ["PARAMD_TLS_CERT is set on host h2", "not on h1"]),
    "newer": ({}, ["rank 1 on host h2 runs paramd 9.9, rank 0 on host h1", "the same version"]),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", sample([*WRONG], ["address"]))
def test_what_is_wrong_on_one_host_is_named_on_all(tmp_path: Path, what: str) -> None:
    env, words = WRONG[what]
    if what == "newer":
        # Python imports it at the start of every process that finds it on its path.
        (tmp_path / "sitecustomize.py").write_text(
            "import paramd.version\nparamd.version.__version__ = '9.9'\n"
        )
        env = {"PYTHONPATH": f"{tmp_path}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    folder = tmp_path / "hosts"
    folder.mkdir()
    with training(2, folder) as (job, _):
        job.start(env=[{}, env])
        assert [process.wait(90.0) for process in job.processes] != [0, 0]
        for number in range(2):
            told = job.output(number).read_text()
            assert all(word in told for word in words), told


def start_sshd(host: Host, folder: Path) -> list[str]:
    """An SSH server on a host; how to call it from another one."""
    sshd = program("sshd")
    for name in ("host-key", "user-key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
        )
    (folder / "authorized").write_text((folder / "user-key.pub").read_text())
    config = folder / "sshd.conf"
    variables = " ".join(
        f'{name}="{value}"'
        for name, value in host.environment().items()
        if name in ("PYTHONPATH", "PARAMD_STATE_DIR")
    )
    config.write_text(
        f"HostKey {folder}/host-key\nAuthorizedKeysFile {folder}/authorized\nStrictModes no\n"
        f"PidFile none\nUsePAM no\nPermitRootLogin yes\nSetEnv {variables}\n"
        f"ListenAddress {host.ip}:22\n"
    )
    users = folder / "passwd"
    users.write_text(
        Path("/etc/passwd").read_text() + "sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n"
    )
    host.run(["mount", "--bind", str(users), "/etc/passwd"])
    host.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "none", "/run"])
    host.run(["mkdir", "/run/sshd"])
    host.run([sshd, "-f", str(config), "-E", str(folder / "sshd.log")])
    known = folder / "known"
    known.write_text(f"{host.ip} {(folder / 'host-key.pub').read_text()}")
    return [program("ssh"), "-i", str(folder / "user-key"), "-o", f"UserKnownHostsFile={known}"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", sample([1, 2], [1]))
def test_one_command_over_ssh_connects_to_a_job_elsewhere(tmp_path: Path, count: int) -> None:
    """With one host the job listens on loopback without TLS: the README's tunnel."""
    with training(count, tmp_path) as (job, laptop):
        ssh = " ".join(start_sshd(job.hosts[0], tmp_path))
        job.start()
        endpoint = job.wait_attached()
        assert endpoint["url"].startswith("http://127.0.0.1" if count == 1 else "https://10.77")
        # A laptop: it reaches the first host alone.
        for host in job.hosts[1:]:
            laptop.run(["ip", "route", "add", "blackhole", f"{host.ip}/32"])
        remote = f"{sys.executable} -m paramd.cli"
        output = tmp_path / "connect"
        connected = laptop.start(
            [*PARAMD, "connect", job.hosts[0].ip, "--ssh", ssh, "--remote", remote], output=output
        )
        try:
            wait_until("connected", lambda: "connected to job" in output.read_text(), timeout_s=60)
            names = laptop.run([*PARAMD, "params", "--job", "far", "-o", "name"]).stdout
            assert names.strip() == "0.weight"
            said = laptop.python(SUMMON).splitlines()
            # It reaches the first host's own address, if the job listens there.
            values, lanes = ([1.0], ["grpc"]) if count == 1 else ([1.0, 2.0], ["stream", "grpc"])
            assert said[0] == f"{NUMEL} {values} {lanes}", said
            there = psutil.Process(connected.pid)
            everyone = [there, *there.children(recursive=True)]
            assert endpoint["token"] not in str([process.cmdline() for process in everyone])
        finally:
            interrupt(connected)
            connected.wait(30.0)
        assert not laptop.run(["ls", str(laptop.folder / "state/far")]).stdout.count("endpoint")
        job.stop()


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C for a command on a host, which `nsenter` may stand before."""
    here = psutil.Process(process.pid)
    for one in (here, *here.children()):
        if one.cmdline()[: len(PARAMD)] == PARAMD:
            one.send_signal(signal.SIGINT)


PROXY = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 3128), backlog=64)
print("listening", flush=True)
while True:
    connection, _ = listener.accept()
    print("asked", connection.recv(200), flush=True)
    connection.close()
"""


@pytest.mark.timeout(300)
def test_hosts_without_ipv4_and_with_proxies_in_the_environment_ask_no_proxy(
    tmp_path: Path,
) -> None:
    with training(2, tmp_path, ipv6=True) as (job, login):
        names = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
        proxies = dict.fromkeys((*names, *map(str.upper, names)), "http://127.0.0.1:3128")
        everywhere = (*job.hosts, login)
        outputs = [tmp_path / f"proxy-{host.name}" for host in everywhere]
        running = [
            host.start([sys.executable, "-c", PROXY], output=output)
            for host, output in zip(everywhere, outputs, strict=True)
        ]
        try:
            for output in outputs:
                wait_until("listening", lambda: "listening" in output.read_text(), timeout_s=60.0)  # noqa: B023
            job.start(env=[proxies, proxies])
            endpoint = job.wait_attached()
            assert endpoint["url"] == f"https://[{job.hosts[0].ip}]:8470"
            check_summon(job.hosts[0], proxies, ["same-host", "stream"])
            env = client_env(endpoint) | proxies
            check_summon(login, env, ["stream", "stream"])
            login.run(["ip", "route", "add", "blackhole", f"{job.hosts[1].ip}/128"])
            check_summon(login, env, ["stream", "grpc"])
            login.run([*PARAMD, "status", "--job", "far"], env=env)
            doctor = login.run([*PARAMD, "doctor", "--job", "far"], env=env, check=False).stdout
            assert "through the control plane" in " ".join(doctor.split()), doctor
            job.stop()
        finally:
            for process in running:
                process.kill()
                process.wait()
        assert [output.read_text() for output in outputs] == ["listening\n"] * 3
