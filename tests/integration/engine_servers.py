"""Servers with the HTTP routes of vLLM 0.33 and SGLang 0.5.23 that update weights, in a thread.

Written from their sources (vllm/entrypoints/rl/online/api_router.py, serve/dev/rpc/api_router.py;
sglang/srt/entrypoints/http_server.py, managers/io_struct.py): same routes, bodies, statuses and
order of effects. What stands for the model is a dict of tensors, loaded from safetensors one by one
as the engines do, so that a load that fails half way leaves a mix.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors import safe_open


class EngineError(Exception):
    """What the engine's process raises; the routes answer 500."""


class Model:
    """The weights of a server, and what has been done to it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.version = "default"
        self.weights: dict[str, torch.Tensor] = {}
        self.paused = ""
        self.calls: list[str] = []
        self.fail_after: int | None = None
        """The next load fails after this many tensors."""
        self.refuse: set[str] = set()
        """Routes that answer 500."""
        self.key = ""
        self.read(path)

    def read(self, path: str) -> None:
        """Load every tensor of a directory's files over those that are there."""
        self.path = path
        files = sorted(Path(path).glob("*.safetensors"))
        if not files:
            raise EngineError(f"Cannot find any model weights with `{path}`")
        loaded = 0
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if self.fail_after is not None and loaded >= self.fail_after:
                        self.fail_after = None
                        raise EngineError("out of memory")
                    self.weights[name] = opened.get_tensor(name)
                    loaded += 1


class _Handler(BaseHTTPRequestHandler):
    model: Model
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def _serve(self, method: str) -> None:
        parts = urlsplit(self.path)
        data = self.rfile.read(int(self.headers.get("content-length", 0)))
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.model.calls.append(parts.path)
        if self.model.key and self.headers.get("authorization") != f"Bearer {self.model.key}":
            self._answer(401, {"error": "Unauthorized"})
        elif parts.path in self.model.refuse:
            self._answer(500, {"error": {"message": "Internal Server Error", "code": 500}})
        else:
            route = self.routes.get((method, parts.path))
            if route is None:
                self._answer(404, {"detail": "Not Found"})
                return
            try:
                status, body = route(self, json.loads(data) if data else None, query)
            except EngineError as error:
                status, body = 500, {"error": {"message": str(error), "code": 500}}
            self._answer(status, body)

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        # As uvicorn does after an exception: without a word to the client.
        self.close_connection = status == 500
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    routes: ClassVar[dict[tuple[str, str], Any]] = {}


Answer = tuple[int, dict[str, Any]]


class VllmHandler(_Handler):
    def _pause(self, _body: Any, query: dict[str, str]) -> Answer:
        mode = query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            return 422, {"detail": [{"loc": ["query", "mode"], "msg": "Input should be ..."}]}
        self.model.paused = mode
        return 200, {"status": "paused"}

    def _resume(self, _body: Any, _query: dict[str, str]) -> Answer:
        self.model.paused = ""
        return 200, {"status": "resumed"}

    def _rpc(self, body: Any, _query: dict[str, str]) -> Answer:
        if not isinstance(body, dict) or body.get("method") is None:
            return 400, {"detail": "Missing 'method' in request body"}
        if body["method"] != "reload_weights" or body.get("args"):
            raise EngineError(f"Method {body['method']!r} is not implemented")
        self.model.read(body.get("kwargs", {}).get("weights_path") or self.model.path)
        return 200, {"results": [None]}

    def _new_version(self, body: Any, _query: dict[str, str]) -> Answer:
        if not isinstance(body, dict) or not isinstance(body.get("new_version"), str):
            return 422, {"detail": [{"loc": ["body", "new_version"], "msg": "Field required"}]}
        self.model.version = body["new_version"]
        return 200, {"success": True, "new_version": self.model.version}

    def _info(self, _body: Any, _query: dict[str, str]) -> Answer:
        return 200, {"weight_version": self.model.version}

    def _models(self, _body: Any, _query: dict[str, str]) -> Answer:
        return 200, {"object": "list", "data": [{"id": "m", "root": self.model.path}]}

    def _reset(self, _body: Any, _query: dict[str, str]) -> Answer:
        return 200, {}

    routes: ClassVar[dict[tuple[str, str], Any]] = {
        ("POST", "/pause"): _pause,
        ("POST", "/resume"): _resume,
        ("POST", "/collective_rpc"): _rpc,
        ("POST", "/update_weight_version"): _new_version,
        ("POST", "/reset_prefix_cache"): _reset,
        ("GET", "/weight_info"): _info,
        ("GET", "/v1/models"): _models,
    }


class SglangHandler(_Handler):
    def _pause(self, body: Any, _query: dict[str, str]) -> Answer:
        if body.get("mode", "abort") not in ("abort", "retract", "in_place"):
            return 422, {"detail": "mode"}
        self.model.paused = body.get("mode", "abort")
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def _continue(self, _body: Any, _query: dict[str, str]) -> Answer:
        self.model.paused = ""
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def _update(self, body: Any, _query: dict[str, str]) -> Answer:
        known = {
            "model_path", "load_format", "abort_all_requests", "weight_version", "is_async",
            "torch_empty_cache", "keep_pause", "recapture_cuda_graph", "token_step", "flush_cache",
            "manifest",
        }  # fmt: skip
        if not isinstance(body.get("model_path"), str) or set(body) - known:
            return 422, {"detail": "body"}
        try:
            self.model.read(body["model_path"])
        except EngineError as error:
            # Its own roll-back reads the path that failed, for that is the model's path already.
            message = f"Failed to update weights: {error}.\nRolling back to original weights."
            return 400, {"success": False, "message": message, "num_paused_requests": 0}
        message = "Succeeded to update model weights."
        if body.get("weight_version") is not None:
            self.model.version = body["weight_version"]
            message += f" Weight version updated to {self.model.version}."
        return 200, {"success": True, "message": message, "num_paused_requests": 0}

    def _info(self, _body: Any, _query: dict[str, str]) -> Answer:
        found = {"model_path": self.model.path, "weight_version": self.model.version}
        return 200, found | {"is_generation": True, "load_format": "auto"}

    routes: ClassVar[dict[tuple[str, str], Any]] = {
        ("POST", "/pause_generation"): _pause,
        ("POST", "/continue_generation"): _continue,
        ("POST", "/update_weights_from_disk"): _update,
        ("GET", "/model_info"): _info,
    }


HANDLERS: dict[str, type[_Handler]] = {"vllm": VllmHandler, "sglang": SglangHandler}


@contextmanager
def engine_server(kind: str, model: Model, *, port: int = 0) -> Iterator[str]:
    """A server on loopback; its URL."""
    handler = type("Handler", (HANDLERS[kind],), {"model": model})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
