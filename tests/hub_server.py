"""A small hub on loopback: as much of its protocol as fetching shards needs, and faults on demand.

It listens on two ports, as the hub does on two hosts: the listing and the `resolve` addresses are
on the first, which redirects to the file's bytes on the second, the CDN. Both are real servers.
"""
import hashlib
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIECE = 4096                                 # bytes, sent at once


class Hub:
    """Files of one dataset repository, by commit, and what happened to the requests for them.

    `faults[name]` is a list: each request for the bytes of that file takes the first away. Faults:
    status=N with retry_after=text or ratelimit=text, cut=N (close after N bytes of the body),
    whole=True (ignore the range), shift=N (answer with a range N bytes later), body=bytes (send
    other content). "listing" names the listing's own faults.
    """

    def __init__(self, repository: str, files: dict[str, bytes], commit: str = COMMIT):
        self.repository, self.commits, self.main = repository, {commit: dict(files)}, commit
        self.published = {}                  # name -> sha256 that the listing says, where untrue
        self.faults, self.rate = {}, None    # rate: bytes/s of one connection
        self.requests, self.sent = [], {}    # (server, method, path, headers); bytes by name
        self.served = 0                      # bytes of bodies
        self.lock = threading.Lock()
        self.hub, self.cdn = self.listen("hub"), self.listen("cdn")
        self.endpoint = f"http://127.0.0.1:{self.hub.server_port}"

    def listen(self, role: str) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads, server.state, server.role = True, self, role
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    def close(self) -> None:
        for server in (self.hub, self.cdn):
            server.shutdown()
            server.server_close()

    def fault(self, name: str) -> dict:
        with self.lock:
            waiting = self.faults.get(name)
            return waiting.pop(0) if waiting else {}

    def asked(self, word: str, role: str = "hub") -> list:
        return [r for r in self.requests if r[0] == role and word in r[2]]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        state, path = self.server.state, unquote(urlsplit(self.path).path)
        parts = path.strip("/").split("/")
        if self.server.role == "hub" and "datasets" not in parts[:2]:
            return self.missing("EntryNotFound")  # what huggingface_hub asks for its own ends
        state.requests.append((self.server.role, self.command, self.path, dict(self.headers)))
        try:
            if self.server.role == "cdn":
                name = "/".join(parts[1:])
                self.body(state.commits[parts[0]].get(name), name)
            elif parts[:2] == ["api", "datasets"]:
                self.listing("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main")
            else:
                self.resolve("/".join(parts[1:3]), parts[4], "/".join(parts[5:]))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def answer(self, status: int, headers: dict, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": len(body)} | headers).items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def failed(self, fault: dict) -> bool:
        if "status" not in fault:
            return False
        extra = {"Retry-After": fault.get("retry_after"), "RateLimit": fault.get("ratelimit")}
        self.answer(fault["status"], {k: v for k, v in extra.items() if v is not None},
                    b"a page that says so")
        return True

    def missing(self, code: str) -> None:
        self.answer(404, {"X-Error-Code": code, "X-Error-Message": "not found"})

    def listing(self, repository: str, revision: str) -> None:
        state = self.server.state
        fault = state.fault("listing")
        commit = state.main if revision == "main" else revision
        if self.failed(fault):
            return
        if "body" in fault:
            self.answer(200, {"Content-Type": "text/html"}, fault["body"])
        elif repository != state.repository:
            self.missing("RepoNotFound")
        elif commit not in state.commits:
            self.missing("RevisionNotFound")
        else:
            files = [{"rfilename": ".gitattributes", "size": 9, "blobId": "0" * 40}]
            for name, data in state.commits[commit].items():
                sha256 = state.published.get(name, hashlib.sha256(data).hexdigest())
                files.append({"rfilename": name, "size": len(data), "blobId": "0" * 40,
                              "lfs": {"sha256": sha256, "size": len(data), "pointerSize": 134}})
            self.answer(200, {"Content-Type": "application/json"}, json.dumps(
                {"id": repository, "sha": commit, "siblings": files}).encode())

    def resolve(self, repository: str, revision: str, name: str) -> None:
        state = self.server.state
        commit = state.main if revision == "main" else revision
        data = state.commits.get(commit, {}).get(name)
        if repository != state.repository or data is None:
            return self.missing("EntryNotFound")
        self.answer(302, {
            "Location": f"http://127.0.0.1:{state.cdn.server_port}/{commit}/{name}",
            "X-Repo-Commit": commit, "X-Linked-Size": len(data),
            "X-Linked-ETag": f'"{hashlib.sha256(data).hexdigest()}"'})

    def body(self, data: bytes | None, name: str) -> None:
        state = self.server.state
        fault = state.fault(name)
        if data is None:
            return self.missing("EntryNotFound")
        if self.failed(fault):
            return
        data, asked, first = fault.get("body", data), self.headers.get("Range"), 0
        if asked and not fault.get("whole"):
            first = int(asked.removeprefix("bytes=").removesuffix("-")) + fault.get("shift", 0)
            if first >= len(data):
                return self.answer(416, {"Content-Range": f"bytes */{len(data)}"})
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data) - first))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        for at in range(first, len(data), PIECE):
            piece = data[at:at + PIECE]
            if "cut" in fault and at - first + len(piece) > fault["cut"]:
                self.close_connection = True
                return
            self.wfile.write(piece)
            with state.lock:
                state.sent[name] = state.sent.get(name, 0) + len(piece)
                state.served += len(piece)
            if state.rate:
                time.sleep(len(piece) / state.rate)


@contextmanager
def serving(repository: str, files: dict[str, bytes], commit: str = COMMIT):
    hub = Hub(repository, files, commit)
    try:
        yield hub
    finally:
        hub.close()
