"""A server on the loopback interface that accepts what wandb sends, for tests.

It answers GraphQL, the file stream and uploads, as wandb 0.31 expects them. How the real server
stores rows is not known: this one stores each line at the offset that wandb states.
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
ENTITY = {"id": "p", "name": "trilgpt", "entity": {"id": "e", "name": "me"}}


@dataclass
class ServerRun:
    """What the server has received of a run."""

    lines: dict[int, str] = field(default_factory=dict)  # of the history, by offset
    sent: list[str] = field(default_factory=list)  # all lines of the history, in order
    variables: dict[str, Any] = field(default_factory=dict)  # of UpsertBucket
    files: dict[str, bytes] = field(default_factory=dict)
    exit_code: int | None = None

    @property
    def rows(self) -> list[dict]:
        return [json.loads(self.lines[offset]) for offset in sorted(self.lines)]

    def config(self) -> dict:
        config = json.loads(self.variables["config"])
        return {key: entry["value"] for key, entry in config.items()}


class WandbServer(ThreadingHTTPServer):
    """runs: what was received, by run id. alerts: titles and texts."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs: dict[str, ServerRun] = {}
        self.alerts: list[dict] = []
        self.artifacts: list[dict] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing if wandb closes a connection."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of processes that use this server."""
        url = f"http://127.0.0.1:{self.server_port}"
        return {"WANDB_BASE_URL": url, "WANDB_API_KEY": 40 * "a"}

    def answer_query(self, query: str, variables: dict) -> dict[str, Any]:
        """The data of a GraphQL answer."""
        name = re.search(r"(?:query|mutation)\s+(\w+)", query)[1]
        run_id = variables.get("name") or variables.get("run") or variables.get("runName") or ""
        if "__type" in query:
            return {alias: {"fields": []} for alias in re.findall(r"(\w+):\s*__type", query)}
        if "viewer" in query:
            return {
                "viewer": VIEWER,
                "serverInfo": {"cliVersionInfo": {"max_cli_version": "9.9.9"}},
            }
        if name == "UpsertBucket":
            is_new = run_id not in self.runs
            run = self.runs.setdefault(run_id, ServerRun())
            run.variables |= {key: v for key, v in variables.items() if v is not None}
            bucket = {"id": run_id, "name": run_id, "displayName": run_id, "project": ENTITY}
            bucket["historyLineCount"] = len(run.lines)
            return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}
        if name == "RunResumeStatus":
            return {"model": ENTITY | {"bucket": self._resume_status(run_id)}}
        if name == "CreateRunFiles":
            url = f"{self.environment['WANDB_BASE_URL']}/files/{run_id}"
            files = [{"name": f, "uploadUrl": f"{url}/{f}"} for f in variables["files"]]
            return {"createRunFiles": {"runID": run_id, "uploadHeaders": [], "files": files}}
        if name == "CreateArtifact":
            self.artifacts.append(variables["input"])
            # a committed artifact is not uploaded
            return {"createArtifact": {"artifact": {"id": "a", "state": "COMMITTED"}}}
        if "Alert" in name:
            self.alerts.append(variables)
            return {"notifyScriptableRunAlert": {"success": True}}
        return {"project": None}  # of ArtifactType: no artifact has this name

    def _resume_status(self, run_id: str) -> dict | None:
        if run_id not in self.runs:
            return None
        run = self.runs[run_id]
        tail = [run.lines[max(run.lines)]] if run.lines else []
        counts = {"historyLineCount": len(run.lines), "eventsLineCount": 0, "logLineCount": 0}
        config = run.variables.get("config", "{}")
        names = {"id": run_id, "name": run_id, "displayName": run_id}
        texts = {"historyTail": json.dumps(tail), "eventsTail": "[]", "summaryMetrics": "{}"}
        return names | counts | texts | {"config": config, "wandbConfig": '{"t": 1}', "tags": []}


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
        _, _, run_id, name = self.path.partition("?")[0].split("/", 3)
        self.wandb.runs[run_id].files[name] = self.read()
        self.reply({})

    def do_POST(self) -> None:
        content = json.loads(self.read())
        if self.path.startswith("/graphql"):
            data = self.wandb.answer_query(content["query"], content.get("variables") or {})
            self.reply({"data": data})
            return
        run = self.wandb.runs[self.path.split("/")[-2]]
        history = (content.get("files") or {}).get("wandb-history.jsonl")
        if history:
            run.lines |= dict(enumerate(history["content"], history["offset"]))
            run.sent += history["content"]
        if content.get("complete"):
            run.exit_code = content["exitcode"]
        self.reply({"exitcode": None, "limits": {}})


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    with WandbServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
