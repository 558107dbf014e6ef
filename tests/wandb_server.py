"""A server on the loopback interface that accepts what wandb sends, for tests.

It answers GraphQL, the file stream and uploads, as wandb 0.31 expects them.
"""

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

VIEWER = {"id": "u", "username": "me", "entity": "me", "flags": "{}", "teams": {"edges": []}}
PROJECT = {"id": "p", "name": "trilgpt", "entity": {"id": "e", "name": "me"}}


@dataclass
class ServerRun:
    """What the server has received of a run."""

    rows: list[dict] = field(default_factory=list)  # of the history, in order
    exit_code: int | None = None


class WandbServer(ThreadingHTTPServer):
    """runs: what was received, by run id. alerts: titles and texts."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs: dict[str, ServerRun] = {}
        self.alerts: list[dict] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing if wandb closes a connection."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of processes that use this server."""
        url = f"http://127.0.0.1:{self.server_port}"
        return {"WANDB_BASE_URL": url, "WANDB_API_KEY": 40 * "a"}

    def answer_query(self, query: str, variables: dict) -> dict[str, Any]:
        """The data of a GraphQL answer."""
        run_id = variables.get("name") or variables.get("run") or ""
        if "__type" in query:
            return {alias: {"fields": []} for alias in re.findall(r"(\w+):\s*__type", query)}
        if "viewer" in query:
            versions = {"cliVersionInfo": {"max_cli_version": "9.9.9"}}
            return {"viewer": VIEWER, "serverInfo": versions}
        match re.search(r"(?:query|mutation)\s+(\w+)", query)[1]:
            case "RunResumeStatus":
                bucket = self.describe_run(run_id) if run_id in self.runs else None
                return {"model": PROJECT | {"bucket": bucket}}
            case "UpsertBucket":
                self.runs.setdefault(run_id, ServerRun())
                return {"upsertBucket": {"bucket": self.describe_run(run_id)}}
            case "CreateRunFiles":
                url = f"{self.environment['WANDB_BASE_URL']}/files"
                files = [{"name": file, "uploadUrl": url} for file in variables["files"]]
                return {"createRunFiles": {"runID": run_id, "uploadHeaders": [], "files": files}}
            case "CreateArtifact":  # a committed artifact is not uploaded
                return {"createArtifact": {"artifact": {"id": "a", "state": "COMMITTED"}}}
            case "NotifyScriptableRunAlert":
                self.alerts.append(variables)
                return {"notifyScriptableRunAlert": {"success": True}}
        return {"project": None}  # of ArtifactType: no artifact has this name

    def describe_run(self, run_id: str) -> dict[str, Any]:
        rows = self.runs[run_id].rows
        names = {"id": run_id, "name": run_id, "displayName": run_id, "project": PROJECT}
        counts = {"historyLineCount": len(rows), "eventsLineCount": 0, "logLineCount": 0}
        tail = json.dumps([json.dumps(row) for row in rows[-1:]])
        texts = {"historyTail": tail, "eventsTail": "[]", "summaryMetrics": "{}", "config": "{}"}
        return names | counts | texts | {"wandbConfig": '{"t": 1}', "tags": []}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def wandb(self) -> WandbServer:
        return cast(WandbServer, self.server)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""

    def read(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        is_compressed = self.headers.get("Content-Encoding") == "gzip"
        return gzip.decompress(body) if is_compressed else body

    def reply(self, answer: dict) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.reply({})

    def do_PUT(self) -> None:
        """Discard a file, such as a picture."""
        self.read()
        self.reply({})

    def do_POST(self) -> None:
        content = json.loads(self.read())
        if self.path.startswith("/graphql"):
            data = self.wandb.answer_query(content["query"], content.get("variables") or {})
            self.reply({"data": data})
            return
        run = self.wandb.runs[self.path.split("/")[-2]]
        history = (content.get("files") or {}).get("wandb-history.jsonl", {"content": []})
        run.rows += map(json.loads, history["content"])
        if content.get("complete"):
            run.exit_code = content["exitcode"]
        self.reply({"exitcode": None, "limits": {}})


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    with WandbServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
