"""A wandb server on this machine for tests: takes what wandb 0.31 uploads and keeps it by run.

    with wandb_stub.serve() as server:
        subprocess.run(..., env=os.environ | server.environment)
    server.runs["abc123"].history

It answers the GraphQL operations that runs, artifacts, sweeps and saved views need; one that it does not know gets an
error and its name is kept in `unknown`. `requests` counts what came in. A CONNECT (an attempt to reach another host
through it as proxy) is kept in `refused`.
"""

import json
import re
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "k" * 40
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
USER = {"id": "U", "entity": "e", "username": "u", "name": "u", "flags": "{}", "teams": {"edges": []}, "admin": False}

OWNER = {"id": "E", "name": "e"}
PROJECT = {"id": "P", "internalId": "1", "name": "p", "entity": OWNER}
SEQUENCE = {"__typename": "ArtifactSequence", "id": "S", "name": "n", "project": PROJECT}
ARTIFACT = {
    **{"__typename": "Artifact", "artifactSequence": SEQUENCE, "versionIndex": 0, "artifactType": {"name": "t"}},
    **{"description": None, "metadata": "{}", "ttlDurationSeconds": -2, "ttlIsInherited": True, "tags": []},
    **{"historyStep": None, "state": "COMMITTED", "size": 1, "digest": "d", "commitHash": "c", "fileCount": 1},
    **{"createdAt": "2026-01-01T00:00:00Z", "updatedAt": None, "aliases": []},
}


@dataclass
class Uploaded:
    """What one run has sent."""

    name: str
    display_name: str | None = None
    group: str | None = None
    job_type: str | None = None
    sweep: str | None = None
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)  # of the history, by their place in it
    files: dict[str, bytes] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)  # artifacts logged
    used: list[str] = field(default_factory=list)  # artifacts read
    exit_code: int | None = None

    @property
    def history(self) -> list[dict[str, Any]]:
        return [self.lines[place] for place in sorted(self.lines)]


class Server(ThreadingHTTPServer):
    """`runs` by their wandb id; `views` and `sweeps` as they were sent; `commands` waits for a sweep's agent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.runs: dict[str, Uploaded] = {}
        self.artifacts: dict[str, str] = {}  # digest and name → id
        self.views: list[dict[str, Any]] = []
        self.sweeps: list[dict[str, Any]] = []
        self.commands: list[dict[str, Any]] = []
        self.unknown: list[str] = []
        self.refused: list[str] = []
        self.requests = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """Sends wandb here, and whatever wants to leave the machine, too."""
        proxies = dict.fromkeys(PROXIES, self.address)
        return {"WANDB_BASE_URL": self.address, "WANDB_API_KEY": KEY, "NO_PROXY": "127.0.0.1", **proxies}

    def run(self, name: str) -> Uploaded:
        return self.runs.setdefault(name, Uploaded(name))

    def answer(self, operation: str, sent: dict[str, Any]) -> dict[str, Any] | None:
        """The data of one GraphQL operation; None for one that is not known."""
        given = sent.get("input") or sent
        match operation:
            case "Viewer" | "GetDefaultEntity":
                return {"viewer": USER}
            case "ServerFeaturesQuery" | "ServerInfo":
                return {"serverInfo": {"features": [], "cliVersionInfo": None, "latestLocalVersionInfo": None}}
            case "UpsertBucket":
                return {"upsertBucket": {"bucket": self.upsert(given), "inserted": True}}
            case "RunResumeStatus":
                return {"model": None}
            case "CreateRunFiles":
                at = f"{self.address}/upload/{given['run']}"
                files = [{"name": name, "uploadUrl": f"{at}/{name}"} for name in given["files"]]
                return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}
            case "MarkRunFilesUploaded":
                return {"markRunFilesUploaded": {"success": True}}
            case "CreateArtifact":
                full = f"{given['artifactTypeName']}/{given['artifactCollectionName']}"
                own = self.artifacts.setdefault(f"{given['digest']} {full}", f"{full}:{len(self.artifacts)}")
                if given.get("runName"):  # without one it is only registered, for a run that uses it
                    self.run(given["runName"]).made.append(own)
                state = {"id": own, "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
                return {"createArtifact": {"artifact": state}}
            case "CreateArtifactManifest" | "UpdateArtifactManifest":
                file = {"id": "F", "uploadUrl": f"{self.address}/manifest", "uploadHeaders": []}
                key = operation[0].lower() + operation[1:]
                return {key: {"artifactManifest": {"id": "M", "file": file}}}
            case "CreateArtifactFiles":
                at = f"{self.address}/artifact"
                nodes = [
                    {"storagePath": one["name"], "uploadUrl": f"{at}/{one['name']}", "uploadHeaders": []}
                    | {"uploadMultipartUrls": None, "artifact": {"id": one["artifactID"]}}
                    for one in given["artifactFiles"]
                ]
                return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}
            case "CommitArtifact":
                return {"commitArtifact": {"artifact": {"id": given["artifactID"], "digest": "d"}}}
            case "ArtifactType":
                return {"project": None}
            case "ArtifactByID":
                return {"artifact": ARTIFACT | {"id": given["id"]}}
            case "UseArtifact":
                self.run(given["runName"]).used.append(given["artifactID"])
                return {"useArtifact": {"artifact": {"id": given["artifactID"]}}}
            case "UpsertView2":
                self.views.append(given)
                return {"upsertView": {"view": {"id": "V", "name": given["name"]}, "inserted": True}}
            case "OrganizationCoreWeaveOrganizationID":
                return {"entity": None}
            case "UpsertSweep":
                self.sweeps.append(given)
                project = {"id": "P", "name": given["projectName"], "entity": {"id": "E", "name": "e"}}
                return {"upsertSweep": {"sweep": {"name": "S", "project": project}, "configValidationWarnings": []}}
            case "SweepWithRuns":
                return {"project": {"sweep": {"name": "S", "runs": {"edges": []}, **self.sweeps[-1]}}}
            case "CreateAgent":
                return {"createAgent": {"agent": {"id": "A"}}}
            case "Heartbeat":
                told = [self.commands.pop(0)] if self.commands else []
                return {"agentHeartbeat": {"agent": {"id": "A"}, "commands": json.dumps(told)}}
        return None

    def upsert(self, given: dict[str, Any]) -> dict[str, Any]:
        run = self.run(given["name"])
        run.display_name = given.get("displayName") or run.display_name
        run.group = given.get("groupName") or run.group
        run.job_type = given.get("jobType") or run.job_type
        run.sweep = given.get("sweep") or run.sweep
        run.tags = given.get("tags") or run.tags
        config = json.loads(given.get("config") or "{}")
        run.config |= {key: value["value"] for key, value in config.items() if key != "_wandb"}
        project = {"id": "P", "name": given.get("project"), "entity": {"id": "E", "name": given.get("entity") or "e"}}
        shown = {"id": given["name"], "name": given["name"], "displayName": run.display_name or given["name"]}
        return shown | {"config": "{}", "sweepName": run.sweep, "historyLineCount": 0, "project": project}

    def stream(self, name: str, sent: dict[str, Any]) -> None:
        """One call of file_stream."""
        run = self.run(name)
        for file, part in (sent.get("files") or {}).items():
            if file == "wandb-history.jsonl":
                run.lines |= {part["offset"] + at: json.loads(line) for at, line in enumerate(part["content"])}
            elif file == "wandb-summary.json":
                run.summary = json.loads(part["content"][-1])
        if sent.get("complete"):
            run.exit_code = sent["exitcode"]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """wandb closes connections as it likes."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = zlib.decompress(body, wbits=31)
        reply: dict[str, Any] = {}
        with self.server.lock:
            self.server.requests += 1
            if self.path.endswith("/graphql"):
                asked = json.loads(body)
                operation = asked.get("operationName") or re.findall(r"(?:query|mutation)\s+(\w+)", asked["query"])[0]
                try:
                    data = self.server.answer(operation, asked.get("variables") or {})
                except Exception as error:
                    data, operation = None, f"{operation}: {error!r}"
                if data is None:
                    self.server.unknown.append(operation)
                    reply["errors"] = [{"message": f"no {operation} here"}]
                reply["data"] = data
            elif self.path.endswith("/file_stream"):
                self.server.stream(self.path.split("/")[-2], json.loads(body))
            elif self.path.startswith("/upload/"):
                _, _, run, file = self.path.split("/", 3)
                self.server.run(run).files[file] = body
        self._send(200, reply)

    do_PUT = do_POST

    def do_GET(self) -> None:
        self._send(200, {})

    def do_CONNECT(self) -> None:
        self.server.refused.append(self.path)
        self._send(403, {})

    def _send(self, status: int, reply: dict[str, Any]) -> None:
        text = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
