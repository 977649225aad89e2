"""The settings of ``gpu-pool serve``, as they stand in ``gpu_pool_config.py`` under ``c.ServeApp``."""

from __future__ import annotations

from traitlets import Bool, List, Unicode
from traitlets.config import Configurable

from gpu_pool_client._traits import Seconds, WholeNumber


class ServeSettings(Configurable):
    """What an administrator may set for the service; each setting says what it is for."""

    socket = Unicode(
        help="""The socket's path. By default /run/gpu-pool/gpu-pool.sock for root,
        $XDG_RUNTIME_DIR/gpu-pool/gpu-pool.sock for others."""
    ).tag(config=True)
    mode = Unicode("0600", help="The socket's mode: 0666 lets every user of the machine in.").tag(config=True)
    store = Unicode(help="The store's file. By default the one of an embedded pool.").tag(config=True)
    admins = List(
        Unicode(), help="Users who see all leases, may end them and drain GPUs; root may, too."
    ).tag(config=True)
    kubernetes = Bool(
        False,
        help="""Whether to serve the GPUs of a Kubernetes cluster in place of this machine's, and to run
        kernels there, in pods. See c.KubernetesSettings.""",
    ).tag(config=True)
    max_connections = WholeNumber(
        1024,
        min=1,
        max=1_000_000,
        help="""Open connections of one user: to the socket, and over TCP once it is known whose they are.
        A user's subordinate uids count to their owner.""",
    ).tag(config=True)
    max_socket_clients = WholeNumber(
        16_384, min=1, max=1_000_000, help="Open connections to the socket at once, of all users together."
    ).tag(config=True)
    reserved_clients = WholeNumber(
        512,
        min=0,
        max=1_000_000,
        help="""Of all connections over TCP, and of all to the socket, those that are kept for
        administrators and for users who hold a slice.""",
    ).tag(config=True)
    first_request_within = Seconds(
        10.0, min=0.1, help="Seconds after which a connection ends on which no request has come."
    ).tag(config=True)
    max_waits = WholeNumber(
        512, min=1, max=1_000_000, help="Requests of one user that may wait at once."
    ).tag(config=True)
    max_decisions = WholeNumber(
        600,
        min=1,
        max=1_000_000_000,
        help="What one user may ask for in a minute, questions apart; administrators may ask more.",
    ).tag(config=True)
    max_requests = WholeNumber(
        120,
        min=1,
        max=1_000_000_000,
        help="""New leases that one user may ask for in a minute, since each is kept in the history;
        administrators may ask for more. A request that is sent again with its key does not count.""",
    ).tag(config=True)
    max_questions = WholeNumber(
        1800,
        min=1,
        max=1_000_000_000,
        help="""Questions of one user that are answered in a minute, such as what is free or why somebody
        waits, one after the other. Administrators and services of the Hub may ask more.""",
    ).tag(config=True)
    bind = Unicode(
        help="""HOST:PORT to listen on for the users of a JupyterHub. By default what a Hub that
        starts the service says; without one, there is the socket only."""
    ).tag(config=True)
    prefix = Unicode(
        help="What all addresses there begin with; by default what the Hub says, or /services/gpu-pool/."
    ).tag(config=True)
    system_users = Unicode(
        help="""What the Hub's users are called on this machine, such as "{username}" for the
        LocalProcessSpawner. Users of the socket with such a name are then the same to the pool.
        By default nobody is."""
    ).tag(config=True)
    ttl = Seconds(
        60.0,
        min=1.0,
        max=3600.0,
        help="Seconds after which a lease asked for over TCP ends if its process was not heard of.",
    ).tag(config=True)
    max_streams = WholeNumber(
        32, min=1, max=1_000_000, help="Live pages that one user may have open at once."
    ).tag(config=True)
    comment_every = Seconds(
        15.0,
        min=0.01,
        max=60.0,
        help="""Seconds after which something is sent to a live page in any case, since proxies end silent
        connections, and after which is asked anew who looks, or waits for a change.""",
    ).tag(config=True)
    longest_stream = Seconds(
        600.0, min=0.01, help="Seconds after which a live page is sent no more, and asks again."
    ).tag(config=True)
    taken_within = Seconds(
        30.0,
        min=0.1,
        help="Seconds in which a client must have taken its answer; one that has not loses its connection.",
    ).tag(config=True)
    metrics_from = List(
        Unicode(),
        help="""Networks, such as 127.0.0.1 or 10.0.0.0/8, from which /metrics may be read without a token
        by whoever does not come through a proxy. By default administrators alone read it.""",
    ).tag(config=True)
    other_courses = Bool(
        False,
        help="""Whether a server may ask in the name of another course than the one that it was started
        for, if its user may use that one, too.""",
    ).tag(config=True)
    max_clients = WholeNumber(16_384, min=1, max=1_000_000, help="Open connections over TCP at once.").tag(
        config=True
    )
    max_unknown_clients = WholeNumber(
        512,
        min=1,
        max=1_000_000,
        help="""Open connections over TCP of one address (of IPv6, of one network of 64 bits) that ask nothing
        and of which it is not known whose they are.""",
    ).tag(config=True)
    max_unknown_tokens = WholeNumber(
        512,
        min=1,
        max=1_000_000,
        help="""Requests of one address that wait at once for the Hub to say whose their tokens are. Those
        with tokens that the Hub has known lately do not count, and wait for none of the others.""",
    ).tag(config=True)
    trusted_downstream_ips = List(
        Unicode(),
        help="""Addresses and networks of proxies, such as 10.0.0.7 or 10.1.0.0/16, from which nothing comes
        but what they pass on. What they say in X-Forwarded-For is then what requests and connections are
        counted by in place of their own address. It identifies nobody.""",
    ).tag(config=True)
