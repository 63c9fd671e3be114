"""generate, hellaswag and export on the checkpoint of a small model with random weights."""
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hub_server import serving

import train_gpt as t
from train_gpt import TINY

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import _model  # noqa: E402  # takes the tools' folder from the path again

from tools import export, generate, hellaswag  # noqa: E402

S = replace(TINY, width=32, head_dim=16, mlp_width=64, layers=3, long_window=(2,),
            value_layers=((1, 0), (3, 1)), skips=((3, 1),), window_unit=8, windows=(2, 4),
            final_windows=(1, 2, 3), steps=10, extra_steps=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    model, generator = t.GPT(S), torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data.normal_(generator=generator).mul_(0.3)
    state = {f"model.{name}": p.data for name, p in model.named_parameters()}
    path = tmp_path_factory.mktemp("run") / "run.pt"
    torch.save(dict(settings=vars(S), step=12, state=state | {"optimizer.head.0": torch.ones(3)}),
               path)
    return path


@pytest.fixture(scope="module")
def trained(checkpoint) -> _model.Trained:
    return _model.load(checkpoint, "cpu")


def alone(trained, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities behind each token of one document, the plain way."""
    x_TD, _ = _model.activations(trained, [tokens])
    return _model.log_probabilities(trained, x_TD[:len(tokens) + 1])


# ---- the model of a checkpoint -------------------------------------------------------------------

def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path, checkpoint):
    path, whole = tmp_path / "a.pt", checkpoint.read_bytes()
    with pytest.raises(t.UserError) as refusal:
        _model.load(path)
    assert "No such file" in refusal.value.line
    torch.save({"settings": {}, "step": 3}, tmp_path / "b.pt")
    for content in (b"", b"text", whole[:len(whole) // 2], (tmp_path / "b.pt").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(t.UserError) as refusal:
            _model.load(path)
        assert "not a checkpoint" in refusal.value.line and str(path) in refusal.value.line
    content = torch.load(checkpoint)
    content["state"]["model.head"] = torch.zeros(3, 4)
    torch.save(content, path)
    with pytest.raises(t.UserError) as refusal:
        _model.load(path)
    assert "parameter head: expected [4224, 32], found [3, 4]" in refusal.value.line


def test_the_stage_belongs_to_the_step(checkpoint, tmp_path):
    content = torch.load(checkpoint)
    for step, stage in ((0, 0), (4, 0), (5, 1), (11, 1), (12, 2)):
        torch.save(content | dict(step=step), tmp_path / "a.pt")
        assert _model.load(tmp_path / "a.pt", "cpu").stage == t.stages(S)[stage]


def test_losses_are_those_of_validation(trained, tmp_path):
    """The same documents through ValData and token_losses."""
    s = replace(S, val_tokens=3000, val_sequence=3000, precision="fp32", compile="off",
                data_dir=str(ROOT / "data" / "tiny"), val_sha256=TINY.val_sha256)
    data = t.ValData(s, Path(s.data_dir), 3008, t.look_back(s))
    batch = data.batch(0)
    view = t.make_view(batch, trained.stage, 3008)
    head = t.Head(s.vocab_size, s.logit_cap, s.logit_slope, 512, False, "reference")
    with torch.no_grad():
        losses = t.token_losses(trained.model(batch, view), trained.model.head, batch.targets_T,
                                head)
    tokens = data.ribbon.read(0, 3001).tolist()
    starts = [n for n, token in enumerate(tokens[:3000]) if token == 4096] + [3000]
    ours = [-alone(trained, tokens[a + 1:b]).gather(
        1, torch.tensor(tokens[a + 1:b + 1])[:, None])[:, 0] for a, b in zip(starts, starts[1:])]
    torch.testing.assert_close(torch.cat(ours), losses[:3000], rtol=1e-4, atol=1e-4)


def test_packed_documents_do_not_see_each_other(trained):
    documents = [[5, 6, 7], [1] * 90, [9], list(range(200, 330))]
    x_TD, borders = _model.activations(trained, documents)
    for document, start in zip(documents, borders.tolist()):
        together = _model.log_probabilities(trained, x_TD[start:start + len(document) + 1])
        torch.testing.assert_close(together, alone(trained, document), rtol=1e-4, atol=1e-4)


# ---- generate ------------------------------------------------------------------------------------

def test_choosing_a_token():
    logp, generator = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log(), torch.Generator()

    def drawn(**options) -> set[int]:
        given = dict(temperature=1.0, top_k=0, top_p=1.0) | options
        return {generate.choose(logp, **given, generator=generator) for _ in range(400)}

    assert drawn() == {0, 1, 2, 3, 4} and drawn(temperature=0) == {0}
    assert drawn(top_k=2) == {0, 1} and drawn(top_k=1) == {0}
    assert drawn(top_p=0.5) == {0} and drawn(top_p=0.6) == {0, 1} and drawn(top_p=0.01) == {0}
    assert drawn(temperature=0.05) == {0}
    counts = torch.zeros(5)
    for _ in range(4000):
        counts[generate.choose(logp, 1.0, 0, 1.0, generator)] += 1
    assert ((counts / 4000 - logp.exp()).abs() < 0.03).all()


def test_the_likeliest_continuation_is_the_argmax_of_each_pass(trained):
    prompt, found = [10, 20, 30], []
    for token in generate.continuation(trained, prompt, 12, 0.0, 0, 1.0, seed=0):
        assert token == int(alone(trained, prompt + found)[-1].argmax())
        found.append(token)
    assert len(found) <= 12
    again = list(generate.continuation(trained, prompt, 12, 1.0, 0, 1.0, seed=4))
    assert again == list(generate.continuation(trained, prompt, 12, 1.0, 0, 1.0, seed=4))
    assert again != list(generate.continuation(trained, prompt, 12, 1.0, 0, 1.0, seed=5))


def test_generate_prints_whole_letters(checkpoint, capsys, monkeypatch):
    coder = _model.tokenizer(_model.load(checkpoint, "cpu"))
    text = coder.encode_ordinary("caf\u00e9 \u20ac \U0001f600!")
    monkeypatch.setattr(generate, "continuation", lambda *given: iter(text))
    assert generate.main([str(checkpoint), "--prompt=A", "--samples=2", "--device=cpu"]) == 0
    assert capsys.readouterr().out == "Acaf\u00e9 \u20ac \U0001f600!\n\n---\nA" \
        "caf\u00e9 \u20ac \U0001f600!\n"


def test_generate_from_a_shell(checkpoint, tmp_path):
    def run(*arguments) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, ROOT / "tools" / "generate.py", *arguments],
                              capture_output=True, text=True, timeout=120)

    done = run(checkpoint, "--prompt=The sea", "--tokens=5", "--device=cpu")
    assert done.returncode == 0 and done.stdout.startswith("The sea") and done.stderr == ""
    missing = run(tmp_path / "no.pt")
    assert missing.returncode == 2 and len(missing.stderr.splitlines()) == 1
    assert run(checkpoint, "--top_p=0").returncode == 2


# ---- HellaSwag -----------------------------------------------------------------------------------

STORIES = [
    ("A man opens a can of paint. he", ["stirs it with a stick.", "eats the moon.", "is a fish.",
                                        "cans."], 0),
    ("The dog runs to the gate and", ["barks.", "reads a long and very dull letter to the king.",
                                      "flies.", "is blue."], 2),
    ("She sits down. She", ["sings a song.", "sings a song again.", "sings.", "sits."], 1)] * 4


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps(dict(ind=n, ctx=ctx, endings=endings, label=label)) + "\n"
                            for n, (ctx, endings, label) in enumerate(STORIES)))
    return path


def naive(trained, coder, context: str, endings: list[str]) -> list[list[float]]:
    """Log-probabilities of each token of each ending, one document at a time."""
    start = coder.encode_ordinary(context)
    result = []
    for ending in endings:
        tokens = coder.encode_ordinary(" " + ending)
        logp = alone(trained, start + tokens)
        result.append([logp[len(start) + i, token].item() for i, token in enumerate(tokens)])
    return result


@pytest.mark.parametrize("batch_tokens", [1, 200, 100_000])
def test_scores_equal_the_plain_way_at_any_batch_size(trained, checkpoint, file, batch_tokens):
    out = file.with_name("out.jsonl")
    assert hellaswag.main([str(checkpoint), f"--file={file}", f"--out={out}", "--device=cpu",
                           f"--batch_tokens={batch_tokens}"]) == 0
    coder, lines = _model.tokenizer(trained), [json.loads(x) for x in out.read_text().splitlines()]
    assert sorted(line["item"] for line in lines) == list(range(len(STORIES)))
    for line in lines:
        context, endings, label = STORIES[line["item"]]
        plain = naive(trained, coder, context, endings)
        sums = [sum(each) for each in plain]
        torch.testing.assert_close(torch.tensor(line["log_probability"]), torch.tensor(sums),
                                   rtol=1e-4, atol=1e-3)
        means = [sum(each) / len(each) for each in plain]
        rates = [total / len((" " + e).encode()) for total, e in zip(sums, endings)]
        for name, values in (("acc", sums), ("acc_norm", means), ("acc_bytes", rates)):
            assert line[name] == (max(range(4), key=values.__getitem__) == label)


def test_hand_worked_judgement():
    item = hellaswag.Item(0, [1], [[1], [1, 2], [1, 2, 3, 4], [1]], [4, 6, 30, 9], label=2)
    sums = [-3.0, -4.5, -8.0, -3.5]          # per token -3, -2.25, -2, -3.5; per byte ..., -.27
    result = hellaswag.judge(item, sums)
    assert (result["acc"], result["acc_norm"], result["acc_bytes"]) == (False, True, True)
    assert hellaswag.judge(item._replace(label=0), sums)["acc"]


def test_it_goes_on_where_it_stopped(checkpoint, file, capsys):
    out = file.with_name("out.jsonl")
    call = [str(checkpoint), f"--file={file}", f"--out={out}", "--device=cpu", "--batch_tokens=1"]
    assert hellaswag.main(call) == 0
    whole, report = out.read_text(), capsys.readouterr().out
    for cut in (0, len(whole) // 3, len(whole) - 5):
        out.write_text(whole[:cut])
        assert hellaswag.main(call) == 0
        assert sorted(out.read_text().splitlines()) == sorted(whole.splitlines())
        assert capsys.readouterr().out == report
    assert re.search(r"acc_norm +\d+\.\d\d %", report)


def test_faults_of_the_file_are_one_line(checkpoint, file, capsys):
    for text in ("{}\n", "text\n", '{"ctx": "a", "endings": ["b"], "label": 0}\n'):
        file.write_text(text)
        assert hellaswag.main([str(checkpoint), f"--file={file}", "--device=cpu"]) == 2
        assert "line 1: expected an item" in capsys.readouterr().err


def test_real_items_against_the_plain_way(trained, checkpoint, shared, tmp_path):
    path = tmp_path / "real.jsonl"
    lines = (shared / "eval" / "hellaswag_val.jsonl").read_text().splitlines()[:200]
    path.write_text("\n".join(lines))
    out, coder = tmp_path / "out.jsonl", _model.tokenizer(trained)
    assert hellaswag.main([str(checkpoint), f"--file={path}", f"--out={out}", "--device=cpu"]) == 0
    results = {r["item"]: r for r in map(json.loads, out.read_text().splitlines())}
    for number in range(0, 200, 8):          # the plain way is slow
        story = json.loads(lines[number])
        plain = [sum(each) for each in naive(trained, coder, story["ctx"], story["endings"])]
        torch.testing.assert_close(torch.tensor(results[number]["log_probability"]),
                                   torch.tensor(plain), rtol=1e-4, atol=1e-3)


# ---- export --------------------------------------------------------------------------------------

def test_export_and_the_example_of_its_docstring(checkpoint, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    assert export.main([str(checkpoint), "OUT.safetensors"]) == 0
    example = export.__doc__.split("To load it again:\n\n")[1]
    names = {}
    exec("\n".join(line[4:] for line in example.splitlines()), names)
    assert names["settings"] == S
    saved = torch.load(checkpoint)["state"]
    for name, p in names["model"].named_parameters():
        assert torch.equal(p, saved[f"model.{name}"])
    assert export.main([str(checkpoint), "B.safetensors", "--dtype=bf16"]) == 0
    assert (tmp_path / "B.safetensors").stat().st_size < 0.51 * (
        tmp_path / "OUT.safetensors").stat().st_size
    assert sorted(p.name for p in tmp_path.iterdir()) == ["B.safetensors", "OUT.safetensors"]
    assert export.main([str(checkpoint), "no/folder/x"]) == 2


def test_hellaswag_comes_from_the_hub_pinned_by_revision_and_hash(tmp_path):
    """A hub on loopback. The second call finds the file in the cache; another file is refused."""
    import pyarrow
    import pyarrow.parquet
    endings = ["he runs.", "he flies.", "he eats.", "no."]
    rows = [dict(ctx="A man walks.", endings=endings, label="2", ind=n) for n in range(3)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = (tmp_path / "a.parquet").read_bytes()
    program = ("import sys; sys.path[:0] = [sys.argv[1], sys.argv[1] + '/tools']\n"
               "import _model, hellaswag\n"
               "hellaswag.SHA256 = sys.argv[2]\n"
               "try:\n    print(len(hellaswag.stories(hellaswag.fetch())))\n"
               "except hellaswag.t.UserError as error:\n    print(error.line)\n")

    def called(sha256: str, endpoint: str, offline: int = 0) -> str:
        return subprocess.run(
            [sys.executable, "-c", program, ROOT, sha256], capture_output=True, text=True,
            env=dict(os.environ, HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path / "cache"),
                     HF_HUB_OFFLINE=str(offline)), check=True).stdout.strip()

    right = hashlib.sha256(data).hexdigest()
    with serving("Rowan/hellaswag", {hellaswag.FETCHED["filename"]: data},
                 hellaswag.FETCHED["revision"]) as hub:
        assert called(right, hub.endpoint) == "3"
        sent = hub.served
        assert sent == len(data)
        assert called(right, hub.endpoint) == "3" and hub.served == sent
        assert "expected sha256 000" in called("0" * 64, hub.endpoint)
    assert called(right, hub.endpoint, 1) == "3"
    shutil.rmtree(tmp_path / "cache")
    assert "name it with --file" in called(right, hub.endpoint, 1)
