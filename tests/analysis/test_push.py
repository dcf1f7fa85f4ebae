"""`lit-effattn push`, by the real client of the hub, against a server of this test on this machine."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_effattn import PixelModel
from lit_effattn.cli import main
from tests.support.commands import fails, last, spec

hub = pytest.importorskip("huggingface_hub")

CONFIG = {
    "model": spec("PixelModel", backbone=spec("Transformer", d_model=8, n_heads=2, n_layers=1)),
    "data": spec("PixelSequences", dataset="digits", batch_size=64),
    "trainer": {
        "max_steps": 2,
        "val_check_interval": 1,
        "limit_val_batches": 1,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
    },
}
TOKEN = "hf_of_this_test"


class Hub(BaseHTTPRequestHandler):
    """The part of the hub that an upload uses. Weights go through the storage of large files."""

    status = 200
    created: list[dict[str, Any]]
    files: dict[str, bytes]
    stored: dict[str, bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != f"Bearer {TOKEN}" or self.status != 200:
            return self.answer({"error": "Invalid username or password."}, self.status if self.status != 200 else 401)
        here = f"http://{self.headers['Host']}"
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            return self.answer({"url": f"{here}/ada/digits", "id": "ada/digits"})
        if self.path == "/api/validate-yaml":
            return self.answer({"warnings": [], "errors": []})
        if self.path == "/api/models/ada/digits/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            return self.answer(
                {"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]}
            )
        if self.path == "/ada/digits.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            actions = [{"upload": {"href": f"{here}/store/{each['oid']}"}} for each in objects]
            answers = [{**each, "actions": action} for each, action in zip(objects, actions, strict=True)]
            return self.answer({"transfer": "basic", "objects": answers})
        if self.path == "/api/models/ada/digits/commit/main":
            for entry in map(json.loads, body.splitlines()):
                value = entry["value"]
                if entry["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    self.files[value["path"]] = self.stored[value["oid"]]
            return self.answer({"commitUrl": f"{here}/ada/digits/commit/0", "commitOid": 40 * "0"})
        return self.answer({"error": f"not expected: {self.path}"}, 500)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert hashlib.sha256(body).hexdigest() == self.path.rpartition("/")[2]
        self.stored[self.path.rpartition("/")[2]] = body
        self.answer({})

    def answer(self, content: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    handler = type("Handler", (Hub,), {"created": [], "files": {}, "stored": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{made.server_port}"
        monkeypatch.setattr(hub.constants, "ENDPOINT", address)  # HF_ENDPOINT was read when the package was imported
        monkeypatch.setattr(hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield handler
        made.shutdown()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["fit", "--config", "tiny.yaml"])
        main(["test", "--ckpt_path", "best"])
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)


def test_what_is_published_is_the_model_and_its_record(server: type[Hub], capsys: pytest.CaptureFixture[str], tmp_path):
    main(["push", "best", "ada/digits", "--license", "apache-2.0", "--private"])
    assert "best.ckpt is at http://127.0.0.1" in capsys.readouterr().out
    (created,) = server.created
    assert (created["name"], created["organization"]) == ("digits", "ada")
    assert created.get("visibility") == "private" or created.get("private") is True  # by the client's version
    assert server.files.keys() == {"model.safetensors", "config.yaml", "README.md"}

    (tmp_path / "model.safetensors").write_bytes(server.files["model.safetensors"])
    model = PixelModel.load_from_checkpoint(tmp_path / "model.safetensors")
    own = torch.load(last("runs").with_name("best.ckpt"), weights_only=True)
    assert all(torch.equal(p, own["state_dict"][name]) for name, p in model.state_dict().items())
    main(["test", "--ckpt_path", str(tmp_path / "model.safetensors"), "--trainer.logger", "false"])
    score = float(capsys.readouterr().out.split("test bits/dim: ")[1].split()[0])
    assert yaml.safe_load(server.files["config.yaml"])["data"]["init_args"]["dataset"] == "digits"

    _, header, text = server.files["README.md"].decode().split("---\n", 2)
    metadata = yaml.safe_load(header)
    assert metadata["license"] == "apache-2.0"
    assert metadata["pipeline_tag"] == "unconditional-image-generation"
    (result,) = metadata["model-index"][0]["results"]
    figures = {metric["name"]: metric["value"] for metric in result["metrics"]}
    assert figures["test/bits_per_dim"] == pytest.approx(score, abs=1e-4)
    assert figures["val/bits_per_dim"] == own["logged"]["metrics"]["val/bits_per_dim"]
    assert f"| parameters | {sum(p.numel() for p in model.parameters()):,} |" in text
    assert "| model.backbone.d_model | 8 |" in text
    assert "hf download ada/digits model.safetensors" in text
    assert hub.ModelCard(server.files["README.md"].decode()).data.library_name == "lit-effattn"


def test_a_checkpoint_outside_of_a_run_has_a_card_too(server: type[Hub], tmp_path: Path):
    path = tmp_path / "alone.ckpt"
    path.write_bytes(last("runs").read_bytes())
    main(["push", str(path), "ada/digits"])
    assert "val/bits_per_dim" in server.files["README.md"].decode()
    assert "license" not in yaml.safe_load(server.files["README.md"].decode().split("---\n", 2)[1])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere.ckpt", "ada/digits"], "push nowhere.ckpt: there is no such file"),
        (["best", "digits"], "the name must be USER/NAME"),
        (["best", "ada/digits--linear"], "does not accept this name: Cannot have -- or .."),
    ],
)
def test_mistakes_are_told_before_anything_is_sent(args, words, server: type[Hub], capsys: pytest.CaptureFixture[str]):
    assert words in fails(capsys, "push", *args)
    assert not server.created


def test_a_token_is_needed(server: type[Hub], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    assert "the hub answered 401" in (message := fails(capsys, "push", "best", "ada/digits"))
    assert "use a token that may write to it" in message
    monkeypatch.delenv("HF_TOKEN")
    assert "there is no token: run `hf auth login`, or set HF_TOKEN" in fails(capsys, "push", "best", "ada/digits")
    assert not server.created


def test_a_hub_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "http://127.0.0.1:9 can't be reached" in fails(capsys, "push", "best", "ada/digits")


def test_the_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("lit_effattn.analysis.push.find_spec", lambda name: None)
    assert "pip install 'lit-effattn[hub]'" in fails(capsys, "push", "best", "ada/digits")
