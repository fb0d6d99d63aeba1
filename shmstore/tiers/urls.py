"""`open_tier`: a tier from its URL, as an operator writes it in a configuration or on a command line.

No error of this module has a part of the URL that may be a password: it names options and shows wrong numbers.
"""

import math
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from shmstore.errors import MissingExtraError, kind_of, shown
from shmstore.store.arguments import seconds_of
from shmstore.tiers.protocol import Tier


def open_tier(url: str, **options: Any) -> Tier:
    """Return the tier of a URL; it connects at the first call.

        file:///directory
        redis://[[user]:password@]host[:port][/db]?expire=SECONDS&connections=NUMBER
        rediss://...?ssl_ca_certs=FILE          the same, with TLS
        unix:///socket?db=NUMBER                the same, on this host
        mooncake://host:port?metadata=...&protocol=...&devices=...&host=...

    Each also takes `timeout`, in seconds. The options are those of `DirectoryTier`, `RespTier` and `MooncakeTier`.
    `options` are the same ones, as values, and go before those of the URL. Characters of a password that mean
    something in a URL are written as %40 for "@", and so on.

    Raises ValueError for a scheme or an option that is not known, and MissingExtraError if the package of the back end
    is not installed.
    """
    make, parts, options = read_url(url, options)
    return make(parts, options)


def read_url(url: str, options: dict[str, Any]) -> "tuple[_Make, SplitResult, dict[str, Any]]":
    """Return what `open_tier` calls for a URL, and with what; the same ValueErrors, without the back end's package."""
    parts = _split(url)
    if parts.scheme not in _SCHEMES:
        schemes = ", ".join(_SCHEMES)
        raise ValueError(
            f"the scheme of a tier's URL must be one of {schemes}, as in file:///directory, not {shown(parts.scheme)}"
        )
    make, known = _SCHEMES[parts.scheme]
    texts = parse_qsl(parts.query, keep_blank_values=True)
    given = dict(texts)
    for name in [*given, *options]:
        if name not in known:
            raise ValueError(f"option {shown(name)} is not known; options of {parts.scheme}:// are {', '.join(known)}")
    if len(given) < len(texts):
        raise ValueError(f"an option is there twice: {', '.join(name for name, _ in texts)}")
    options = {name: _parsed(known[name], name, text) for name, text in given.items()} | options
    if not 0 < seconds_of("timeout", options.get("timeout", 1.0)) < math.inf:
        raise ValueError(f"timeout must be a number of seconds above 0, not {shown(options['timeout'])}")
    return make, parts, options


def shown_url(url: str) -> str:
    """Return the URL without user, password and options, for people and logs."""
    parts = _split(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _split(url: str) -> SplitResult:
    """Split a URL; refuse one in which a password may be where it is shown."""
    if not isinstance(url, str):
        raise TypeError(f"url must be a str, not {kind_of(url)}")
    with suppress(ValueError):  # its message has a part of the URL
        parts = urlsplit(url)
        _ = parts.port
        if not (parts.fragment or "@" in parts.query or (parts.scheme != "file" and "@" in parts.path)):
            return parts
    raise ValueError(
        "the URL of a tier cannot be read: write @ / ? # : % of user, password and options as %XX, and a port as a "
        "number from 1 to 65535"
    )


def _parsed(kind: Callable[[str], Any], name: str, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        number = "a whole number" if kind is int else "a number"
        raise ValueError(f"option {name} must be {number}, not {shown(text)}") from None


def _file(parts: SplitResult, options: dict[str, Any]) -> Tier:
    from shmstore.tiers.directory import DirectoryTier

    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ValueError("the URL of a directory is file:///directory, with three slashes")
    return DirectoryTier(unquote(parts.path), **options)


def _resp(parts: SplitResult, options: dict[str, Any]) -> Tier:
    try:
        from shmstore.tiers.resp import RespTier
    except ImportError as error:
        raise MissingExtraError(what=f"{parts.scheme}://", extra="redis") from error
    if not (parts.path if parts.scheme == "unix" else parts.hostname):
        raise ValueError(f"the URL must name a server, such as {parts.scheme}://{_RESP_EXAMPLES[parts.scheme]}")
    if parts.scheme != "unix" and re.fullmatch("(/[0-9]*)?", parts.path) is None:  # redis-py would ignore it
        raise ValueError(f"the path of the URL must be the number of a database, such as {parts.scheme}://host:6379/1")
    ours = {name: options.pop(name) for name in ("timeout", "expire", "connections") if name in options}
    query = f"?{urlencode(options)}" if options else ""
    return RespTier(f"{parts.scheme}://{parts.netloc}{parts.path}{query}", **ours)


def _mooncake(parts: SplitResult, options: dict[str, Any]) -> Tier:
    from shmstore.tiers.mooncake import MooncakeTier

    if "@" in parts.netloc or parts.path not in ("", "/"):
        raise ValueError("the URL of a Mooncake Store is mooncake://host:port, with the master's host and port")
    return MooncakeTier(parts.netloc, **options)


_Options: TypeAlias = dict[str, Callable[[str], Any]]
_Make: TypeAlias = Callable[[SplitResult, dict[str, Any]], Tier]
_RESP_EXAMPLES = {"redis": "host:6379", "rediss": "host:6379", "unix": "/run/redis.sock"}
_RESP: _Options = {"timeout": float, "expire": int, "connections": int, "db": int, "username": str, "password": str}
TLS = ("ssl_ca_certs", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile")
_MOONCAKE: _Options = {"metadata": str, "protocol": str, "devices": str, "host": str, "timeout": float}
_SCHEMES: dict[str, tuple[_Make, _Options]] = {
    "file": (_file, {"timeout": float}),
    "redis": (_resp, _RESP),
    "rediss": (_resp, _RESP | dict.fromkeys(TLS, str)),
    "unix": (_resp, _RESP),
    "mooncake": (_mooncake, _MOONCAKE),
}
"""For each scheme the function that makes its tier, and its options with what reads their texts."""
