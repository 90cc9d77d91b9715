"""A real sshd on the second host, with keys made for the test, and the configurations of ssh and ipyparallel for it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.launch.second_host import FAR_HOST, Network, why_not
from tests.support.processes import until
from tests.support.script import MARK

_PORT = 22
_SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin") or ""


def why_no_ssh() -> str:
    """Why there can be no sshd on a second host here; empty when there can."""
    if not _SSHD or shutil.which("ssh") is None:
        return "needs sshd and ssh: Debian's openssh-server"
    return why_not()


@dataclass(frozen=True)
class SshServer:
    """A running sshd, which ssh reaches as `far-host`."""

    process: subprocess.Popen[bytes]
    config: Path
    """ssh's configuration."""
    ipython: Path
    """IPython's folder, with ipyparallel's configuration."""

    def configure(self, *lines: str) -> None:
        """Write ipyparallel's configuration: ssh's own, and these lines."""
        folder = self.ipython / "profile_default"
        folder.mkdir(parents=True, exist_ok=True)
        first = f"c.SSHLauncher.ssh_args = ['-F', {str(self.config)!r}]"
        (folder / "ipcluster_config.py").write_text("\n".join([first, *lines, ""]))


@contextlib.contextmanager
def serve_ssh(link: Network, folder: Path) -> Iterator[SshServer]:
    """Run sshd on the second host, for as long as it lasts."""
    for name in ("host_key", "user_key", "stranger_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=60)
    (folder / "authorized_keys").write_text((folder / "user_key.pub").read_text())
    (folder / "known_hosts").write_text(f"{link.far_ip} {(folder / 'host_key.pub').read_text()}")
    (folder / "sshd_config").write_text(
        f"ListenAddress {link.far_ip}\nPort {_PORT}\nHostKey {folder / 'host_key'}\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {folder / 'authorized_keys'}\nStrictModes no\nPermitRootLogin yes\n"
        f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nAcceptEnv {MARK} AXON_NB_RUNTIME_DIR\n"
    )
    config = folder / "ssh_config"
    common = (
        f"HostName {link.far_ip}\nUser root\nIdentitiesOnly yes\nUserKnownHostsFile {folder / 'known_hosts'}\n"
        f"SendEnv {MARK} AXON_NB_RUNTIME_DIR\n"
    )
    config.write_text(
        f"Host {FAR_HOST}\n{common}IdentityFile {folder / 'user_key'}\n"
        f"Host stranger\n{common}IdentityFile {folder / 'stranger_key'}\n"
        f"Host closed\n{common}Port {_PORT + 1}\n"
    )
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's empty folder, which its service makes
    namespace = next(iter(link.environment.values()))
    move = ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", f'hostname {FAR_HOST}; exec "$@"', "sh"]
    log = folder / "sshd.log"
    process = subprocess.Popen([*move, _SSHD, "-D", "-E", log, "-f", folder / "sshd_config"], stdin=subprocess.DEVNULL)
    try:
        assert until(lambda: _listens(link.far_ip)), log.read_text()
        server = SshServer(process, config, folder / "ipython")
        server.configure()
        yield server
    finally:
        process.terminate()
        process.wait(60)


def _listens(ip: str) -> bool:
    try:
        socket.create_connection((ip, _PORT), 1.0).close()
    except OSError:
        return False
    return True
