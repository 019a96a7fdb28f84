"""What a harness needs where its store is a server: to start and kill it, and a proxy with faults before it.

    [port] = free_ports(1)
    server = ServerProcess(["my-server", "--port", str(port)], ready="ready to accept connections")
    server.start()
    proxy = Proxy([port])  # the backend connects to proxy.port, the hooks to port

    class MyHarness(Harness):
        ...

        def num_requests(self, tmp):
            return proxy.num_requests

        @contextmanager
        def faulty(self, tmp, fault):
            if fault is Fault.KILLED:
                fault_there = server.killed()
            elif fault in (Fault.FULL, Fault.READ_ONLY):
                fault_there = ...  # a setting of the server: a limit, a right that is taken away
            else:
                fault_there = proxy.faulty(fault)
            with fault_there:
                yield

Both are processes: they share no interpreter lock with what is tested, and end with this process, however
that ends. Nothing here knows a protocol. The page docs/how-to/publish-a-backend.md has a whole harness.
"""

from lmcache_core_conformance.network.proxy import NetworkFault, Proxy
from lmcache_core_conformance.network.server import ServerProcess, free_ports

__all__ = ["NetworkFault", "Proxy", "ServerProcess", "free_ports"]
