"""A server that speaks what huggingface_hub's `create_commit` and `snapshot_download` need, over repositories in memory.

It keeps no history of files: a repository is the files of its last commit on each branch. All files are uploaded in the
commit itself, none by LFS or Xet.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_secretsecretsecret"


@dataclass
class Repository:
    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    """The messages."""

    def commit_of(self, branch: str) -> str:
        digest = hashlib.sha1(branch.encode())
        for path, data in sorted(self.branches[branch].items()):
            digest.update(path.encode() + data)
        return digest.hexdigest()

    def at(self, revision: str) -> str | None:
        """The branch of a revision, which is a branch or its last commit."""
        return next((each for each in self.branches if revision in (each, self.commit_of(each))), None)


@dataclass
class Hub:
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    refuses: tuple[int, str] | None = None
    """The status and message of every answer, instead of the right one."""
    card_problem: str = ""
    """What the Hub finds wrong in the YAML of README.md."""
    tokens: set[str | None] = field(default_factory=set)
    """The authorizations that came."""


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(lambda path: self._post(path, body))

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def _answer(self, make: Any) -> None:
        self.hub.tokens.add(self.headers.get("Authorization"))
        try:
            if self.hub.refuses is not None:
                status, message = self.hub.refuses
                status, made = status, {"error": message}
            else:
                made = make(unquote(urlsplit(self.path).path))
                status = 400 if isinstance(made, dict) and made.get("errors") else 200
        except LookupError:
            status, made = 404, {"error": "Not found"}
        headers, data = made if isinstance(made, tuple) else ({}, json.dumps(made).encode())
        self.send_response(status)
        if status == 404:
            headers["X-Error-Code"] = "EntryNotFound" if "/resolve/" in self.path else "RepoNotFound"
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _post(self, path: str, body: bytes) -> Any:
        repositories = self.hub.repositories
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'jane'}/{asked['name']}"
            new = Repository(asked.get("private", asked.get("visibility") == "private"))
            new.branches["main"] = {".gitattributes": b"*.onnx filter=lfs\n"}
            repositories.setdefault(name, new)
            return {"url": f"{self.hub.url}/{name}"}
        if path == "/api/validate-yaml":
            problem = self.hub.card_problem
            return {"errors": [{"message": problem}] if problem else [], "warnings": []}
        if path == "/api/models/jane/net/branch/next":
            repositories["jane/net"].branches.setdefault("next", dict(repositories["jane/net"].branches["main"]))
            return {}
        name, what, revision = self._parts(path)
        if what == "preupload":
            files = json.loads(body)["files"]
            return {"files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in files]}
        assert what == "commit", path
        return self._commit(repositories[name], name, revision, [json.loads(line) for line in body.splitlines()])

    def _commit(self, repository: Repository, name: str, branch: str, lines: list[Any]) -> Any:
        files = dict(repository.branches[branch])
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repository.commits.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]
        repository.branches[branch] = files
        commit = repository.commit_of(branch)
        return {"commitUrl": f"{self.hub.url}/{name}/commit/{commit}", "commitOid": commit}

    def _get(self, path: str) -> Any:
        if found := re.fullmatch(r"/([\w-]+/[\w-]+)/resolve/(\w+)/(.+)", path):
            name, revision, file = found.groups()
            repository = self.hub.repositories[name]
            branch = repository.at(revision)
            data = repository.branches[branch or ""][file]
            mark = hashlib.sha256(data).hexdigest()
            return {"X-Repo-Commit": repository.commit_of(branch or ""), "ETag": f'"{mark}"'}, data
        name, what, revision = self._parts(path)
        repository = self.hub.repositories[name]
        branch = repository.at(revision)
        files = repository.branches[branch or ""]
        if what == "tree":
            return [{"type": "file", "path": each, "size": len(data), "oid": "0" * 40} for each, data in files.items()]
        assert what == "revision", path
        siblings = [{"rfilename": each} for each in files]
        return {"id": name, "sha": repository.commit_of(branch or ""), "siblings": siblings, "private": True}

    def _parts(self, path: str) -> tuple[str, str, str]:
        found = re.fullmatch(r"/api/models/([\w-]+/[\w-]+)/(\w+)/([\w-]+)/?", path)
        assert found is not None, path
        return found[1], found[2], found[3]
