"""S1, S2: no URL leads to a neighbour, whatever spelling, name, redirect or second answer of a name server it uses."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from tests.support.receivers import port_without_listener

from modelyard.policy.addresses import networks
from modelyard.web.fetcher import Bounds, DownloadBounds, Fetcher, FetchError

HERE = networks(["127.0.0.0/8"])
BOUNDS = Bounds(timeout_s=5, bytes_max=1000)

LITERALS = [
    "127.0.0.1",
    "127.1",
    "127.0.1",
    "2130706433",
    "0x7f000001",
    "0x7f.1",
    "0177.0.0.1",
    "017700000001",
    "0",
    "0.0.0.0",
    "①②⑦.⓪.⓪.①",
    "127。0。0。1",
    "127.0.0.1.",
    "127.0.0.1%00",
    "%31%32%37.0.0.1",
    "localhost",
    "localhost.",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "100.100.100.200",
    "192.0.0.8",
    "192.0.0.192",
    "192.0.2.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "168.63.129.16",
    "192.88.99.1",
    "[::]",
    "[::1]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::ffff:0:127.0.0.1]",
    "[::127.0.0.1]",
    "[::ffff:10.0.0.1]",
    "[64:ff9b::7f00:1]",
    "[64:ff9b::169.254.169.254]",
    "[64:ff9b:1::1]",
    "[2002:7f00:1::]",
    "[2002:a9fe:a9fe::1]",
    "[2001:0:4136:e378:8000:63bf:80ff:fffe]",
    "[fe80::1]",
    "[fe80::1%25lo]",
    "[fc00::1]",
    "[fd00:ec2::254]",
    "[fec0::1]",
    "[ff02::1]",
    "[2001:db8::1]",
    "[100::1]",
    "[3fff::1]",
    "[5f00::1]",
]


async def to_loopback(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


def answers(*texts: str) -> Callable[[str, int], Awaitable[Sequence[str]]]:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return texts

    return resolve


@pytest.mark.parametrize("host", LITERALS)
async def test_no_spelling_of_a_neighbour_is_fetched(host: str) -> None:
    fetcher = Fetcher(resolve=to_loopback)
    for url in (f"https://{host}/", f"https://{host}:8443/x?y=1"):
        with pytest.raises(FetchError):
            await fetcher.fetch("GET", url, bounds=BOUNDS)


@pytest.mark.parametrize(
    "host", ["93.184.216.34", "[2606:2800:220:1::1]", "[64:ff9b::5db8:d822]", "example.com", "a_b.example"]
)
async def test_public_hosts_pass(host: str) -> None:
    target = await Fetcher(resolve=answers("93.184.216.34")).check(f"https://{host}/in?x=1#part")
    assert (target.port, target.url) == (443, f"https://{host}/in?x=1")


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "ftp://example.com/",
        "file:///etc/passwd",
        "gopher://example.com/",
        "//example.com/",
        "",
        "https://",
        "https:///x",
        "https://user@example.com/",
        "https://user:pw@example.com/",
        "https://example.com@10.0.0.1/",
        "https://example.com\\@10.0.0.1/",
        "https://exa mple.com/",
        "https://example.com/\r\nx: y",
        "https://example.com:0/",
        "https://example.com:99999/",
        "https://example.com:x/",
        "https://exämple.com/",
        "https://-x.example/",
        "https://a..b/",
        "https://[::1/",
        "https://[zz]/",
        "data:text/plain,x",
        "javascript:alert(1)",
        "https://example.com/" + "x" * 3000,
    ],
)
async def test_what_is_no_plain_https_url_is_refused(url: str) -> None:
    with pytest.raises(FetchError):
        await Fetcher(resolve=answers("93.184.216.34")).check(url)


@pytest.mark.parametrize("texts", [("93.184.216.34", "127.0.0.1"), ("::1", "93.184.216.34"), ("fe80::1%lo",), ()])
async def test_one_bad_answer_of_the_name_server_is_enough(texts: tuple[str, ...]) -> None:
    with pytest.raises(FetchError):
        await Fetcher(resolve=answers(*texts)).check("https://example.com/")


async def test_a_name_that_does_not_resolve_is_told() -> None:
    async def fail(host: str, port: int) -> Sequence[str]:
        raise OSError("no such name, says 10.0.0.53")

    with pytest.raises(FetchError, match=r"^its host does not resolve$"):
        await Fetcher(resolve=fail).check("https://nowhere.example/")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/", "https://127.0.0.1/", "http://[::ffff:127.0.0.1]/"])
async def test_networks_of_the_operator_are_allowed_and_only_those(url: str) -> None:
    with pytest.raises(FetchError):
        await Fetcher(networks(["10.0.0.0/8"])).check(url)
    if "ffff" in url:  # http needs the very address to be named
        with pytest.raises(FetchError):
            await Fetcher(HERE).check(url)
    else:
        await Fetcher(HERE).check(url)


# --- real connections ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(answer: bytes, seen: list[bytes]) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


def whole(body: bytes, *lines: str, status: str = "200 OK") -> bytes:
    head = "".join(f"{line}\r\n" for line in lines)
    return f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n{head}\r\n".encode() + body


async def test_the_connection_goes_to_the_judged_address_under_the_given_name() -> None:
    asked: list[str] = []

    async def changing(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.99"]

    seen: list[bytes] = []
    async with serving(whole(b"hello", "content-type: text/plain; charset=x"), seen) as port:
        url = f"http://hooks.example:{port}/in%2Fside?q=a%20b"
        fetched = await Fetcher(HERE, resolve=changing).fetch(
            "POST", url, bounds=BOUNDS, headers={"x-a": "b"}, body=b"{}"
        )
    assert (fetched.status, fetched.content_type, fetched.body) == (200, "text/plain", b"hello")
    assert asked == ["hooks.example"], "resolved once"
    head = seen[0].decode().lower()
    assert head.startswith("post /in%2fside?q=a%20b http/1.1")
    assert f"host: hooks.example:{port}" in head
    assert "x-a: b" in head


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data",
        "file:///etc/passwd",
        "http://10.0.0.1/",
        "https://[::1]/",
        "//10.0.0.1/",
    ],
)
async def test_a_redirect_is_judged_like_a_url(location: str) -> None:
    seen: list[bytes] = []
    bounds = Bounds(timeout_s=5, bytes_max=1000, redirects_max=3)
    async with serving(whole(b"", f"location: {location}", status="302 Found"), seen) as port:
        with pytest.raises(FetchError):
            await Fetcher(HERE).fetch("GET", f"http://127.0.0.1:{port}/", bounds=bounds)
    assert len(seen) == 1


async def test_a_redirect_to_another_port_reaches_nobody() -> None:
    canary: list[bytes] = []
    async with serving(whole(b"secret"), canary) as other:
        location = f"location: http://127.0.0.1:{other}/"
        async with serving(whole(b"", location, status="307 Temporary Redirect"), []) as port:
            with pytest.raises(FetchError, match="another port"):
                await Fetcher(HERE).fetch("GET", f"http://127.0.0.1:{port}/", bounds=Bounds(5, 1000, redirects_max=3))
    assert canary == []


async def test_redirects_end_and_webhooks_follow_none() -> None:
    seen: list[bytes] = []
    async with serving(whole(b"", "location: /again", status="302 Found"), seen) as port:
        url = f"http://127.0.0.1:{port}/"
        with pytest.raises(FetchError, match="more than 2 redirects"):
            await Fetcher(HERE).fetch("GET", url, bounds=Bounds(5, 1000, redirects_max=2))
        assert len(seen) == 3
        assert (await Fetcher(HERE).fetch("POST", url, bounds=BOUNDS)).status == 302
    assert len(seen) == 4


async def test_sizes_types_and_times_are_bounded() -> None:
    async with serving(whole(b"x" * 5000, "content-type: text/html"), []) as port:
        url = f"http://127.0.0.1:{port}/"
        with pytest.raises(FetchError, match="larger"):
            await Fetcher(HERE).fetch("GET", url, bounds=BOUNDS)
        cut = await Fetcher(HERE).fetch("GET", url, bounds=Bounds(5, 1000, is_cut=True))
        assert len(cut.body) == 1000
        with pytest.raises(FetchError, match="content type"):
            await Fetcher(HERE).fetch("GET", url, bounds=Bounds(5, 9000, content_types=("image/png",)))
    async with serving(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", []) as port:
        with pytest.raises(FetchError):
            await Fetcher(HERE).fetch("GET", f"http://127.0.0.1:{port}/", bounds=BOUNDS)


async def test_a_silent_peer_is_left_in_time() -> None:
    gone = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        gone.set()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(FetchError, match=r"0\.2 s"):
        await Fetcher(HERE).fetch("GET", f"http://127.0.0.1:{port}/", bounds=Bounds(0.2, 1000))
    server.close()
    await asyncio.wait_for(server.wait_closed(), 20)


async def test_nobody_there_is_an_error_without_addresses() -> None:
    with port_without_listener() as port, pytest.raises(FetchError) as failed:
        await Fetcher(HERE, resolve=to_loopback).fetch("GET", f"http://x.example:{port}/", bounds=BOUNDS)
    assert str(failed.value) == "the server cannot be reached: connection refused"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "the server cut the connection without an answer"),
        (b"nonsense\r\n\r\n", "the server's answer is no valid HTTP"),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc",
            "the server cut the connection in the middle of its answer",
        ),
    ],
)
async def test_a_broken_answer_is_told_in_words(answer: bytes, words: str) -> None:
    async with serving(answer, []) as port:
        with pytest.raises(FetchError) as failed:
            await Fetcher(HERE).fetch("GET", f"http://127.0.0.1:{port}/", bounds=BOUNDS)
    assert str(failed.value) == words


async def test_a_download_that_is_cut_says_how_much_came() -> None:
    async with serving(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", []) as port:
        with pytest.raises(FetchError, match=r"^it was cut off after 3 of 9 bytes$"):
            async with Fetcher(HERE).open(f"http://127.0.0.1:{port}/", bounds=DownloadBounds(1000)) as answer:
                await answer.read()


async def test_a_refused_host_is_named_with_the_setting_and_one_of_a_redirect_is_not() -> None:
    with pytest.raises(FetchError, match=r"^'models\.example' has no public address; .* fetch\.private_networks$"):
        await Fetcher(resolve=to_loopback).check("https://models.example/")
    away = whole(b"", "location: https://10.7.7.7/", status="302 Found")
    async with serving(away, []) as port:
        with pytest.raises(FetchError, match=r"^a host that it redirects to has no public address") as failed:
            await Fetcher(HERE).fetch("GET", f"http://127.0.0.1:{port}/", bounds=Bounds(5, 1000, redirects_max=1))
    assert "10.7" not in str(failed.value)
