"""TLS 1.3 between a run and the peers that dial it: the run's certificate, and trust in exactly that.

- A run makes a certificate authority of its own and a certificate by it, or takes its user's certificate.
- Trust is in the run, not in a name: who dials compares the certificate's fingerprint with the one in its ticket, and
  a relay's certificate is the run's, or by its authority. So a run may be reached under any name, through any tunnel.
- Nothing is sent before the fingerprint has been compared.
"""

import asyncio
import datetime
import hashlib
import hmac
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from elastic.protocol.sockets import DIALS_PER_S, DialRates, network_of
from elastic.system.files import write_whole

DIRECTORY = "tls"
"""The directory of a run with its authority and its certificate."""
MADE_BEFORE = datetime.timedelta(days=1)
"""Certificates are dated back as much, for clocks that are slow."""
VALID = datetime.timedelta(days=365)
HANDSHAKE = b"\x16"
"""The first byte of TLS: a record of a handshake."""
ACCEPT_PAUSE_S = 0.05
"""After a connection could not be accepted: waiting peers stay in the kernel's queue."""


class TlsError(Exception):
    """A certificate cannot be made or used; the message names the file and what is wrong with it."""


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """A server's certificate, by whose `fingerprint` it is known, and the `anchor` (PEM) from which it can be verified.

    `chain` and `key` are files in PEM.
    """

    chain: Path
    key: Path
    fingerprint: str
    anchor: str


def fingerprint_of(certificate: bytes) -> str:
    """SHA-256 of a certificate in DER, in hexadecimal."""
    return hashlib.sha256(certificate).hexdigest()


def given_certificate(chain: Path, key: Path) -> Certificate:
    """The user's own. Raises `TlsError` for files that are no certificate and its key."""
    try:
        pem = chain.read_text()
        first = pem[: pem.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)]
        certificate = Certificate(
            chain=chain, key=key, fingerprint=fingerprint_of(ssl.PEM_cert_to_DER_cert(first.strip())), anchor=first
        )
        server_context(certificate)
    except OSError as error:
        # ssl.SSLError is one, too.
        raise TlsError(f"run.certificate {chain} with run.certificate_key {key}: {error.strerror or error}") from error
    except ValueError as error:
        raise TlsError(f"run.certificate {chain}: not a certificate in PEM: {error}") from error
    return certificate


def run_certificate(run_dir: Path, names: Sequence[str]) -> Certificate:
    """The run's own, for these names and addresses; made, with an authority for it, if the run has none yet.

    Raises `OSError`.
    """
    directory = run_dir / DIRECTORY
    if not (directory / "server.pem").exists():
        _make(directory, names)
    made = given_certificate(directory / "server.pem", directory / "server.key")
    return msgspec.structs.replace(made, anchor=(directory / "ca.pem").read_text())


def own_authority(run_dir: Path) -> Path | None:
    """The file with the authority of the run's own certificate, which clients trust; None if it has made none."""
    authority = run_dir / DIRECTORY / "ca.pem"
    return authority if authority.exists() else None


def _make(directory: Path, names: Sequence[str]) -> None:
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
        return key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def alternative(name: str) -> x509.GeneralName:
        try:
            return x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            return x509.DNSName(name)

    def called(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    def certificate(subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, ca: bool) -> x509.CertificateBuilder:
        others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
        usage = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - MADE_BEFORE)
            .not_valid_after(now + VALID)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
            .add_extension(
                x509.KeyUsage(digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, **usage), critical=True
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
        )

    now = datetime.datetime.now(datetime.UTC)
    run = directory.parent.name
    authority, authority_key = called(f"elastic run {run}"), ec.generate_private_key(ec.SECP256R1())
    root = certificate(authority, authority_key, ca=True).sign(authority_key, hashes.SHA256())
    server_key = ec.generate_private_key(ec.SECP256R1())
    server = (
        certificate(called(run), server_key, ca=False)
        .add_extension(
            x509.SubjectAlternativeName([alternative(name) for name in dict.fromkeys(names)]), critical=False
        )
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    directory.mkdir(mode=0o700, exist_ok=True)
    # The server's certificate comes last: where it is, all of them are.
    for name, content in (
        ("ca.pem", root.public_bytes(pem)),
        ("ca.key", key_pem(authority_key)),
        ("server.key", key_pem(server_key)),
        ("server.pem", server.public_bytes(pem) + root.public_bytes(pem)),
    ):
        write_whole(directory / name, content)


def server_context(certificate: Certificate) -> ssl.SSLContext:
    """Raises `OSError` where the certificate cannot be read, or its key is another's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate.chain, certificate.key)
    return context


def pinning_context() -> ssl.SSLContext:
    """To dial somebody who is known by a fingerprint, which `check_pin` compares."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check_pin(transport: asyncio.BaseTransport, fingerprint: str) -> None:
    """Raises `TlsError` unless the other end of a fresh connection is the one of this fingerprint."""
    found = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
    if not hmac.compare_digest(fingerprint_of(found or b""), fingerprint):
        raise TlsError(
            f"it shows another certificate (fingerprint {fingerprint_of(found or b'')[:16]}…) than the run of this "
            f"ticket ({fingerprint[:16]}…)"
        )


def anchored_context(anchor: str) -> ssl.SSLContext:
    """To reach a peer whose certificate is, or was issued by, this one (PEM), under whatever name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=anchor)
    return context


Peer = TypeVar("Peer")
Refuse = Callable[[str, str], None]
"""Hears the address of somebody with whom there was no handshake, and why."""


def oldest_of_crowd(peers: Iterable[tuple[Peer, str]]) -> Peer:
    """The first of those that come from the address of which there are most. Each has its address; the oldest first."""
    known = list(peers)
    crowds = Counter(address for _, address in known)
    most = max(crowds.values())
    return next(peer for peer, address in known if crowds[address] == most)


class TlsServer:
    """Accepts TLS connections on a socket that listens, from now on; each gets a protocol once it is encrypted.

    Unauthenticated peers cost little: of more than `most` handshakes at once (or than peers are `expected`, where
    these are more) the oldest ends of the address that has the most, and each ends after `timeout_s`. An address that
    dials more often than `dials_per_s`, beyond twice `most` at once, is hung up on before a handshake has begun.

    Where `may_be_plain` says so of a peer's address, it gets its protocol without encryption if it begins with anything
    else than a handshake.
    """

    def __init__(
        self,
        listener: socket.socket,
        certificate: Certificate,
        make_protocol: Callable[[], asyncio.Protocol],
        most: int,
        timeout_s: float,
        refuse: Refuse = lambda address, reason: None,
        dials_per_s: float = DIALS_PER_S,
        expected: Callable[[], int] = lambda: 0,
        may_be_plain: Callable[[str], bool] = lambda address: False,
    ) -> None:
        self.sockets = [listener]
        self._listener = listener
        self._context = server_context(certificate)
        self._make_protocol = make_protocol
        self._most = most
        self._timeout_s = timeout_s
        self._refuse = refuse
        self._expected = expected
        self._may_be_plain = may_be_plain
        self._rates = DialRates(2 * most, dials_per_s)
        self._handshakes: dict[asyncio.Task[None], str] = {}
        """The oldest first, with the addresses."""
        listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(), name="TLS server")

    def close(self) -> None:
        """Stop listening; connections that stand go on."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(self._listener)
            except OSError:  # no descriptor is left, or the peer is gone already
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            address = network_of(str(peer[0]))
            if not self._rates.admits(address, loop.time()):
                connection.close()
                self._refuse(address, "it dials too often")
                await asyncio.sleep(0)  # What waits to be accepted is accepted without a pause.
                continue
            greeting = self._greet if self._may_be_plain(str(peer[0])) else self._shake_hands
            task = asyncio.create_task(greeting(connection, address), name="TLS handshake")
            self._handshakes[task] = address
            task.add_done_callback(lambda task: self._handshakes.pop(task, None))
            if len(self._handshakes) > max(self._most, self._expected()):
                crowded = oldest_of_crowd(self._handshakes.items())
                address = self._handshakes.pop(crowded)
                crowded.cancel()
                self._refuse(address, "too many TLS handshakes are under way")

    async def _greet(self, connection: socket.socket, address: str) -> None:
        """Let a peer in that may speak plain text, by what its first byte says."""
        try:
            async with asyncio.timeout(self._timeout_s):
                begins = await _first_byte(connection)
                if begins != HANDSHAKE:
                    await asyncio.get_running_loop().connect_accepted_socket(self._make_protocol, connection)
        except OSError:
            connection.close()
            return
        except asyncio.CancelledError:
            connection.close()
            raise
        if begins == HANDSHAKE:
            await self._shake_hands(connection, address)

    async def _shake_hands(self, connection: socket.socket, address: str) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol, connection, ssl=self._context, ssl_handshake_timeout=self._timeout_s
            )
        except OSError as error:
            self._refuse(address, f"no TLS handshake: {_why(error)}")
        except asyncio.CancelledError:
            connection.close()
            raise


async def _first_byte(connection: socket.socket) -> bytes:
    """What the peer begins with, left to be read; empty if it has hung up."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(connection, lambda: None if readable.done() else readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(connection)
    return connection.recv(1, socket.MSG_PEEK)


def _why(error: OSError) -> str:
    """In words that do not vary with what the peer sent."""
    reason = str(getattr(error, "reason", "") or type(error).__name__)
    return "the peer spoke plain text" if reason in _PLAIN_TEXT else reason.lower().replace("_", " ")


_PLAIN_TEXT = (
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "HTTPS_PROXY_REQUEST",
    "UNKNOWN_PROTOCOL",
    "PACKET_LENGTH_TOO_LONG",
)
