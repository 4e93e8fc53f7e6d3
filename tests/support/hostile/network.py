"""Ways out by sockets."""

# ruff: noqa: E501

from support.hostile.kinds import Kinds

KINDS = Kinds("network")
add = KINDS.add

add(
    "tcp",
    """
import socket
attempt(lambda: socket.create_connection(("127.0.0.1", AIM["tcp"]), 2))
""",
)
add(
    "tcp by raw calls",
    """
import ctypes, struct
def go():
    fd = call("socket", 2, 1, 0)
    address = struct.pack("=HH4s8x", 2, int.from_bytes(AIM["tcp"].to_bytes(2, "big"), "little"), bytes([127, 0, 0, 1]))
    return ctypes.CDLL(None, use_errno=True).connect(fd, address, 16) == 0
attempt(go)
""",
)
add(
    "tcp by ipv6 that maps ipv4",
    """
import socket
def go():
    own = socket.socket(socket.AF_INET6)
    own.settimeout(2)
    own.connect(("::ffff:127.0.0.1", AIM["tcp"]))
    return True
attempt(go)
""",
)
add(
    "tcp fast open",
    """
import socket
socket.socket().sendto(b"x", 0x20000000, ("127.0.0.1", AIM["tcp"]))
""",
)
add(
    "multipath tcp",
    """
import socket
def go():
    own = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
    own.settimeout(2)
    return own.connect(("127.0.0.1", AIM["tcp"])) is None
attempt(go)
""",
)
add(
    "tcp server",
    """
import socket
def go():
    own = socket.socket()
    own.bind(("0.0.0.0", 0))
    own.listen()
    other = socket.create_connection(("127.0.0.1", AIM["tcp"]), 2)
    return True
attempt(go)
""",
)
add(
    "udp",
    """
import socket
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", AIM["udp"]))
""",
)
add(
    "raw, packet, netlink and ping sockets",
    """
import socket
attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3))
""",
)
add(
    "netlink, interfaces of the host",
    """
import socket, struct
def go():
    own = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    own.send(struct.pack("=IHHIIB15x", 32, 18, 0x301, 1, 0, 0))
    found = own.recv(1 << 16)
    return b"eth" in found or b"en" in found or b"veth" in found or len(found) > 2000
attempt(go)
""",
)
add(
    "names by the resolver",
    """
import socket
attempt(lambda: socket.gethostbyname("localhost") and socket.create_connection(("localhost", AIM["tcp"]), 2))
""",
)
add(
    "abstract socket",
    """
import socket
attempt(lambda: socket.socket(socket.AF_UNIX).connect("\\0" + AIM["secret"]) is None)
""",
)
add(
    "socket with a path",
    """
import socket
attempt(lambda: socket.socket(socket.AF_UNIX).connect(AIM["other"] + "/listener") is None)
""",
)
add(
    "named pipe",
    """
attempt(lambda: os.open(AIM["other"] + "/pipe", os.O_RDWR | os.O_NONBLOCK) >= 0)
""",
)
add(
    "socketpair that gets descriptors of others",
    """
import array, socket
def go():
    one, two = socket.socketpair()
    one.sendmsg([b"x"], [(socket.SOL_SOCKET, 2, __import__("struct").pack("3i", 1, 0, 0))])  # as pid 1
    return True
attempt(go)
""",
)
add(
    "socketpair by a raw call",
    'reach("socketpair", 1, 1, 0, __import__("ctypes").create_string_buffer(8))\n',
)
add("vsock", 'reach("socket", 40, 1, 0)\n')
add(
    "kernel crypto (AF_ALG)",
    """
import socket
def go():
    own = socket.socket(38, 5, 0)
    own.bind(("hash", "sha256"))
    return True
attempt(go)
""",
)
add(
    "every family of sockets",
    """
for family in range(0, 46):
    for kind in (1, 2, 3, 5):
        try:
            call("socket", family, kind, 0)
        except OSError as error:
            if error.errno in (1, 13, 22, 38, 93, 94, 97):
                continue
        if family not in (1, 2, 10, 16):  # those are in the namespaces of the network and files
            won()
""",
)
add("io_uring", 'reach("io_uring_setup", 8, bytes(120))\n')
add(
    "libraries that connect",
    """
for name in ("urllib.request", "http.client", "ftplib", "smtplib", "xmlrpc.client"):
    try:
        module = __import__(name, fromlist=["x"])
    except ImportError:
        continue
    address = "http://127.0.0.1:%d/" % AIM["tcp"]
    if name == "urllib.request":
        attempt(lambda: module.urlopen(address, timeout=0.3))
    if name == "http.client":
        attempt(lambda: module.HTTPConnection("127.0.0.1", AIM["tcp"], timeout=0.3).connect() is None)
import asyncio
attempt(lambda: asyncio.run(asyncio.open_connection("127.0.0.1", AIM["tcp"])))
""",
)
