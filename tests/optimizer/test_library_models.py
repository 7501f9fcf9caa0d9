"""Models named by their library: `timm:NAME`, `torchvision:NAME`, `transformers:FOLDER`, and images and texts as inputs."""

import json
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torchvision_operators
from safetensors.torch import save_file
from torch import nn
from user_folder import UserFolder, refused

from optimize_export.errors import UsageError
from optimizer.command import cli
from optimizer.command.early_checks import split_library
from optimizer.command.loading import Loaded, load
from optimizer.command.up_to_date import BuildInputs, inputs_of
from optimizer.command.user_code import names_restored

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "its", "dog", "ran", "far", "away"]
OPEN = {0: "batch", 1: "time"}
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
# A model of timm that is made for tests, and a small one of torchvision.
SMALL, SMALL_OF_TORCHVISION = "test_resnet.r160_in1k", "mobilenet_v3_small"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The current folder is empty, and nothing reaches a hub, even where there is a network."""
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with names_restored():
        yield


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """timm, whose weights aren't in a cache."""
    torchvision_operators.declare()
    import timm
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return timm


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torchvision, whose weights can't be downloaded."""
    torchvision_operators.declare()
    import torchvision
    from torchvision.models import _api

    def download(*_: object, **__: object) -> None:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(_api, "load_state_dict_from_url", download)
    return torchvision


def text_model(folder: Path, *, tokenizer: bool = True, **settings: Any) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    model = BertForSequenceClassification(BertConfig(vocab_size=40, **SIZES, **settings))
    model.save_pretrained(folder)
    if tokenizer:
        (folder / "words.txt").write_text("\n".join(WORDS))
        BertTokenizerFast(str(folder / "words.txt"), model_max_length=12).save_pretrained(folder)
    return model


def vision_model(folder: Path) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **SIZES))
    model.save_pretrained(folder)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    return model


def picture(name: str, size: tuple[int, int] = (40, 30), seed: int = 0) -> Path:
    from PIL import Image

    pixels = numpy.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=numpy.uint8)
    path = Path(name)
    Image.fromarray(pixels).save(path)
    return path


def state_of(model: nn.Module, name: str = "weights.pt") -> Path:
    torch.save(model.state_dict(), name)
    return Path(name)


def same_weights(loaded: Loaded, model: nn.Module) -> bool:
    ours, theirs = loaded.model.state_dict(), model.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


# ------------------------------------------------------------------------------------------------------------ MODEL


@pytest.mark.parametrize("spec", ["timm:", "timm", "timm: ", "torchvision:", "transformers:"])
def test_a_library_without_a_name(spec: str) -> None:
    assert "names no model of" in refused(spec, error=UsageError)


def test_the_name_may_be_an_option_and_a_folder_of_checkpoints_is_no_module(tmp_path: Path, timm: Any) -> None:
    assert split_library("timm", "resnet50") == ("timm", "resnet50")
    (tmp_path / "timm").mkdir()
    assert split_library("timm:resnet50", "resnet50") == ("timm", "resnet50")
    assert "use only one of them" in refused("timm:resnet50", name="resnet18", error=UsageError)


@pytest.mark.parametrize("library", ["timm", "torchvision", "transformers"])
def test_a_library_that_isnt_installed(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    assert refused(f"{library}:net") == (
        f"{library}:net needs the package {library}, which isn't installed: pip install {library}."
    )


def test_a_file_of_the_users_is_named_by_its_path(tmp_path: Path, timm: Any) -> None:
    for place in ("timm.py", "timm/__init__.py"):
        UserFolder(tmp_path)("def resnet50(): return Net(5)", place)
        assert load(f"{place}:resnet50").model.linear.out_features == 5
        assert split_library("timm:resnet50") == ("timm", "resnet50")


def test_a_module_of_a_library_is_still_a_module(timm: Any) -> None:
    loaded = load("timm.models.byobnet:test_byobnet", inputs=["2x3x32x32"])
    assert loaded.source == "timm.models.byobnet:test_byobnet"


# ------------------------------------------------------------------------------------------------------------- timm


def test_timm_with_weights_of_the_users(timm: Any) -> None:
    model = timm.create_model(SMALL)
    loaded = load(f"timm:{SMALL}", weights=state_of(model))
    assert loaded.source == f"timm:{SMALL}"
    assert same_weights(loaded, model)
    assert not loaded.model.training
    assert [tensor.shape for tensor in loaded.example_inputs] == [(2, 3, 160, 160)]
    again, other = (load(f"timm:{SMALL}", weights=Path("weights.pt"), seed=seed).example_inputs[0] for seed in (0, 1))
    assert torch.equal(again, loaded.example_inputs[0])
    assert not torch.equal(other, again)


def test_timm_with_its_pretrained_weights(timm: Any, tmp_path: Path) -> None:
    model = timm.create_model(SMALL)
    timm.models.save_for_hf(model, tmp_path / "net")
    loaded = load(f"timm:local-dir:{tmp_path / 'net'}")
    assert loaded.source == "timm:net"
    assert same_weights(loaded, model)


def test_timm_never_keeps_random_weights(timm: Any) -> None:
    sentence = refused(f"timm:{SMALL}")
    assert sentence.startswith(f"timm:{SMALL} couldn't be created with its pretrained weights (without a network, pass")
    assert " with --weights FILE): LocalEntryNotFoundError: " in sentence
    assert "--weights FILE): RuntimeError: No pretrained weights exist" in refused("timm:coatnet_0_224")
    assert "Invalid pretrained tag (nosuch)" in refused("timm:resnet18.nosuch")
    state_of(nn.Linear(2, 2))
    assert "don't fit the model: missing" in refused(f"timm:{SMALL}", weights=Path("weights.pt"))


# ------------------------------------------------------------------------------------------------------- torchvision


def test_torchvision_with_its_pretrained_weights_or_yours(torchvision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pass your own with --weights FILE): URLError: " in refused(f"torchvision:{SMALL_OF_TORCHVISION}")
    model = torchvision.models.get_model(SMALL_OF_TORCHVISION)
    loaded = load(f"torchvision:{SMALL_OF_TORCHVISION}", weights=state_of(model))
    assert loaded.source == f"torchvision:{SMALL_OF_TORCHVISION}"
    assert same_weights(loaded, model)
    assert [tensor.shape for tensor in loaded.example_inputs] == [(2, 3, 224, 224)]
    monkeypatch.setattr(torchvision.models._api, "load_state_dict_from_url", lambda *_, **__: model.state_dict())
    assert same_weights(load(f"torchvision:{SMALL_OF_TORCHVISION}"), model)


@pytest.mark.usefixtures("timm", "torchvision")
@pytest.mark.parametrize(
    ("library", "name", "advice"),
    [
        ("timm", "resnet5O", "did you mean resnet50"),
        ("timm", "no such", "timm.list_models() lists all."),
        ("timm", "../resnet50", "did you mean resnet50"),
        ("torchvision", "resnet50x", "did you mean resnet50 or"),
        ("torchvision", "?", "torchvision.models.list_models() lists all."),
    ],
)
def test_a_library_has_no_such_model(library: str, name: str, advice: str) -> None:
    assert refused(f"{library}:{name}").startswith(f"{library} has no model {name!r}; {advice}")


@pytest.mark.slow
def test_the_size_of_images_is_that_of_the_weights(torchvision: Any) -> None:
    """Also of a model for segmentation, whose first part has weights of its own; videos aren't images."""
    name = "lraspp_mobilenet_v3_large"
    weights = state_of(torchvision.models.get_model(name, weights=None, weights_backbone=None))
    assert load(f"torchvision:{name}", weights=weights).example_inputs[0].shape == (2, 3, 520, 520)
    weights = state_of(torchvision.models.get_model("r3d_18", weights=None))
    assert "The inputs of torchvision:r3d_18 aren't known; pass each" in refused("torchvision:r3d_18", weights=weights)


# ------------------------------------------------------------------------------------------------------ transformers


def test_a_text_model_of_a_folder(tmp_path: Path) -> None:
    model = text_model(tmp_path / "my bert")
    loaded = load("transformers:my bert")
    assert loaded.source == "transformers:my bert"
    assert type(loaded.model) is type(model)
    assert same_weights(loaded, model)
    assert loaded.example_inputs is None
    ids, mask = loaded.example_kwargs["input_ids"], loaded.example_kwargs["attention_mask"]
    assert ids.shape == mask.shape == (2, 16)
    assert ids.min() > 0
    assert ids.max() < 40
    assert mask.sum(1).tolist() == [16, 12]
    assert loaded.dynamic == {"input_ids": OPEN, "attention_mask": OPEN}
    assert loaded.notes == ()


def test_inputs_of_the_users_have_their_own_dims(tmp_path: Path) -> None:
    text_model(tmp_path / "bert")
    loaded = load("transformers:bert", inputs=["input_ids=int64[2,5]:1..40"])
    assert (loaded.dynamic, loaded.notes) == (None, ())
    ids = torch.randint(5, 17, (3, 7))
    save_file({"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}, "call.safetensors")
    loaded = load("transformers:bert", input_files=[Path("call.safetensors")])
    assert loaded.dynamic == {"input_ids": OPEN, "token_type_ids": OPEN}


def test_a_vision_model_of_a_folder(tmp_path: Path) -> None:
    model = vision_model(tmp_path / "vit")
    loaded = load(f"transformers:{tmp_path / 'vit'}")
    assert loaded.source == "transformers:vit"
    assert same_weights(loaded, model)
    assert loaded.example_kwargs["pixel_values"].shape == (2, 3, 16, 16)
    assert loaded.dynamic is None


def test_weights_in_a_lower_precision_become_float32(tmp_path: Path) -> None:
    text_model(tmp_path / "bert").to(torch.bfloat16).save_pretrained("bert")
    loaded = load("transformers:bert")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    assert loaded.notes == ("The weights of bert are in bfloat16, and were loaded in float32.",)
    from transformers import BertModel

    config = json.loads(Path("bert/config.json").read_text())
    Path("bert/config.json").write_text(json.dumps({**config, "architectures": None}))
    loaded = load("transformers:bert", weights=state_of(BertModel(loaded.model.config)))
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}


def test_weights_of_the_users_replace_those_of_the_folder(tmp_path: Path) -> None:
    text_model(tmp_path / "bert")
    other = text_model(tmp_path / "other")
    (tmp_path / "bert" / "model.safetensors").unlink()
    assert "couldn't be created: OSError: " in refused("transformers:bert")
    assert same_weights(load("transformers:bert", weights=state_of(other)), other)


def test_a_folder_whose_weights_lack_some_of_the_model(tmp_path: Path) -> None:
    from transformers import BertForMaskedLM

    config = text_model(tmp_path / "bert").config
    BertForMaskedLM(config).save_pretrained("bert")
    settings = json.loads((tmp_path / "bert" / "config.json").read_text())
    (tmp_path / "bert" / "config.json").write_text(json.dumps({**settings, "architectures": None}))
    assert refused("transformers:bert") == (
        "The weights of transformers:bert lack pooler.dense.bias, pooler.dense.weight, which AutoModel needs."
    )


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nosuch/dir", "nosuch/dir isn't a folder here, and couldn't be loaded from the hub or its cache: OSError: "),
        ("no such folder", "no such folder isn't a folder here, and couldn't be loaded from the hub or its cache: "),
        ("empty", "transformers:empty couldn't be created: ValueError: "),
        ("empty/note.txt", "empty/note.txt isn't a folder here, and couldn't be loaded from the hub or its cache: "),
        ("hostile", "transformers:hostile couldn't be created: "),
    ],
)
def test_folders_and_names_that_have_no_model(tmp_path: Path, name: str, part: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "note.txt").write_text("")
    (tmp_path / "hostile").mkdir()
    code = {"auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}, "model_type": "unheard-of"}
    (tmp_path / "hostile" / "config.json").write_text(json.dumps({**code, "architectures": [5]}))
    (tmp_path / "hostile" / "code.py").write_text("raise SystemExit('this ran')")
    sentence = refused(f"transformers:{name}")
    assert sentence.startswith(part)
    assert "this ran" not in sentence


def test_models_whose_inputs_arent_known(tmp_path: Path) -> None:
    from transformers import T5Config, T5Model

    T5Model(T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)).save_pretrained("t5")
    assert refused("transformers:t5").startswith("The inputs of transformers:t5 aren't known; pass each input with")


# -------------------------------------------------------------------------------------------------- images and texts


def test_an_image_is_preprocessed_as_timm_does(timm: Any) -> None:
    from PIL import Image

    weights = state_of(timm.create_model(SMALL))
    loaded = load(f"timm:{SMALL}", weights=weights, input_files=[picture("a.png"), picture("b.JPG", seed=1)])
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=loaded.model))
    assert torch.equal(loaded.example_inputs[0], transform(Image.open("a.png"))[None])
    assert [args[0].shape for args, _ in loaded.further_inputs] == [(1, 3, 160, 160)]


def test_an_image_is_preprocessed_as_torchvision_does(torchvision: Any) -> None:
    from PIL import Image

    weights = state_of(torchvision.models.get_model(SMALL_OF_TORCHVISION))
    loaded = load(f"torchvision:{SMALL_OF_TORCHVISION}", weights=weights, input_files=[picture("a.webp")])
    transform = torchvision.models.get_model_weights(SMALL_OF_TORCHVISION).DEFAULT.transforms()
    assert torch.equal(loaded.example_inputs[0], transform(Image.open("a.webp").convert("RGB"))[None])


def test_an_image_is_preprocessed_as_the_folder_says(tmp_path: Path) -> None:
    from PIL import Image
    from transformers import AutoImageProcessor

    vision_model(tmp_path / "vit")
    (tmp_path / "images").mkdir()
    for number in range(3):
        picture(f"images/{number}.png", seed=number)
    (tmp_path / "images" / "labels.txt").write_text("cat\n")
    loaded = load("transformers:vit", input_files=[Path("images/0.png")], calibration=Path("images"))
    wanted = AutoImageProcessor.from_pretrained("vit")(images=Image.open("images/0.png"), return_tensors="pt")
    assert torch.equal(loaded.example_kwargs["pixel_values"], wanted["pixel_values"])
    assert [call.kwargs["pixel_values"].shape for call in loaded.calibration or ()] == [(1, 3, 16, 16)] * 3


def test_each_line_of_a_text_is_a_row(tmp_path: Path) -> None:
    text_model(tmp_path / "bert")
    Path("texts.txt").write_text("the cat sat\n\n  its dog ran far away  \n", encoding="utf-8-sig")
    Path("long.txt").write_text("the cat " * 50)
    loaded = load("transformers:bert", input_files=[Path("texts.txt")], calibration=Path("long.txt"))
    number = WORDS.index
    assert loaded.example_kwargs["input_ids"].tolist() == [
        [2, number("the"), number("cat"), number("sat"), 3, 0, 0],
        [2, *map(number, ["its", "dog", "ran", "far", "away"]), 3],
    ]
    assert loaded.example_kwargs["attention_mask"].sum(1).tolist() == [5, 7]
    assert [call.kwargs["input_ids"].shape for call in loaded.calibration or ()] == [(1, 12)]


def test_files_that_cant_be_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text_model(tmp_path / "bert")
    vision_model(tmp_path / "vit")
    files = {"a.txt": b"the cat", "empty.txt": b" \n", "bad.txt": b"\xff\xfe", "bad.png": b"\x89PNG"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "none").mkdir()
    picture("a.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:200])

    def sentence(model: str, file: str) -> str:
        return refused(model, input_files=[Path(file)])

    assert "a.txt is a text file, but transformers:vit takes an image (.jpg " in sentence("transformers:vit", "a.txt")
    assert "a.png is an image, but transformers:bert takes a text file (.txt)" in sentence("transformers:bert", "a.png")
    assert sentence("transformers:bert", "empty.txt") == "The text file empty.txt is empty: write one text per line."
    assert "bad.txt couldn't be read as UTF-8" in sentence("transformers:bert", "bad.txt")
    assert "The image bad.png couldn't be read: " in sentence("transformers:vit", "bad.png")
    assert "The image cut.png couldn't be read: " in sentence("transformers:vit", "cut.png")
    assert "contains no .safetensors, .npz or .txt file" in refused("transformers:bert", calibration=tmp_path / "none")
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert sentence("transformers:vit", "a.png") == "Pillow, which reads a.png, isn't installed: pip install pillow."


def test_a_folder_without_tokenizer_or_processor(tmp_path: Path) -> None:
    text_model(tmp_path / "bert", tokenizer=False)
    vision_model(tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").unlink()
    Path("a.txt").write_text("the cat")
    picture("a.png")
    assert refused("transformers:bert", input_files=[Path("a.txt")]) == (
        "bert has no tokenizer: save it there with tokenizer.save_pretrained."
    )
    sentence = refused("transformers:vit", input_files=[Path("a.png")])
    assert sentence.startswith("a.png couldn't be preprocessed for transformers:vit: OSError: ")


@pytest.mark.parametrize("name", ["a.png", "a.txt"])
def test_the_preprocessing_of_a_model_of_the_users_isnt_known(tmp_path: Path, name: str) -> None:
    path = UserFolder(tmp_path)("")
    Path(name).write_text("the cat")
    sentence = refused(str(path), input_files=[Path(name)])
    assert "the model's preprocessing of it isn't known: save the tensors of a call in a .safetensors file" in sentence


# ------------------------------------------------------------------------------------------------------ the whole way


def exported(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = cli.main([*arguments, "--json", "--quick", "--formats", "onnx"])
    out, err = capfd.readouterr()
    assert code == 0, err
    return json.loads(out)


@pytest.mark.slow
def test_a_text_model_gets_a_dynamic_length(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text_model(tmp_path / "bert")
    Path("texts.txt").write_text("the cat sat\nits dog ran far away\n")
    document = exported(capfd, "transformers:bert", "--inputs", "texts.txt")
    assert document["model"]["source"] == "transformers:bert"
    assert document["bundle"] == "dist/bert"
    assert [entry["shape"] for entry in document["artifacts"][0]["inputs"]] == [["batch", "time"]] * 2
    document = exported(capfd, "transformers:bert", "--static-batch", "--output", "dist/static")
    assert document["artifacts"][0]["inputs"][0]["shape"] == [2, 16]


@pytest.mark.slow
def test_a_model_of_timm_is_proven_on_an_image(timm: Any, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    weights = state_of(timm.create_model(SMALL))
    picture("a.png")
    document = exported(capfd, f"timm:{SMALL}", "--weights", str(weights), "--inputs", "a.png")
    assert document["model"]["source"] == f"timm:{SMALL}"
    assert document["artifacts"][0]["inputs"][0]["shape"] == ["batch", 3, 160, 160]


@pytest.mark.usefixtures("timm")
def test_a_model_of_a_library_is_compared_by_the_files_of_its_folder_and_its_name(tmp_path: Path) -> None:
    text_model(tmp_path / "bert")

    def recorded(model: str) -> BuildInputs:
        options = cli.parse([model, "--output", "out"])
        return inputs_of(options)

    of_folder = recorded("transformers:bert")
    assert of_folder.options["model"] == "transformers:bert"
    assert {"MODEL config.json", "MODEL model.safetensors"} <= of_folder.files.keys()
    assert of_folder.path("MODEL config.json") == Path("bert", "config.json")
    of_hub = recorded("timm:resnet18")
    assert (of_hub.options["model"], of_hub.files) == ("timm:resnet18", {})
