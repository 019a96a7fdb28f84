"""What a harness needs where its store is a server: to start and kill it, and a proxy with faults before it.

    server = ServerProcess(["redis-server", "--port", str(port)], ready="Ready to accept connections")
    server.start()
    proxy = Proxy([port])        # the backend connects to proxy.port, the harness itself to port
    with proxy.faulty(Fault.RESET):
        ...                      # every connection is reset in the middle of a value

Both are processes: they share no interpreter lock with what is tested, and end with this process, however
that ends. Nothing here knows a protocol. How a harness uses them stands in docs/how-to/publish-a-backend.md.
"""

from lmcache_core_conformance.network.proxy import NetworkFault, Proxy
from lmcache_core_conformance.network.server import ServerProcess, free_ports

__all__ = ["NetworkFault", "Proxy", "ServerProcess", "free_ports"]
