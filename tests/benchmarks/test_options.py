"""An option of a benchmark that names something unknown, or no number, is an error in one sentence."""

import pytest
from benchmark_runs import run_benchmark

WRONG = (
    ("channels_last", "--models=bert_small", "there is no model 'bert_small'"),
    ("checkpoints", "--models=resnet18", "there is no model 'resnet18'"),
    ("checkpoints", "--compile=resnet18", "there is no model 'resnet18'"),
    ("checkpoints", "--ways=magic", "there is no way 'magic'"),
    ("cold_start", "--models=vit_large", "there is no model 'vit_large'"),
    ("correctness", "--cases=conv9d", "there is no case 'conv9d'"),
    ("each_pass", "--ways=everything", "there is no way 'everything'"),
    ("first_call", "--models=vit_large", "there is no model 'vit_large'"),
    ("fusion", "--elements=many", "'many'"),
    ("gpu", "--cases=resnet51", "there is no case 'resnet51'"),
    ("gpu", "--contenders=tensorrt", "there is no contender 'tensorrt'"),
    ("large", "--formats=tflite", "there is no 'tflite'"),
    ("latency", "--models=resnet51", "there is no model 'resnet51'"),
    ("load_overhead", "--ways=tensorrt", "there is no way 'tensorrt'"),
    ("locating", "--kinds=nonsense", "there is no 'nonsense'"),
    ("overhead", "--nodes=60,none", "no list of numbers"),
    ("overhead", "--shapes=round", "no shape 'round'"),
    ("proof_cost", "--models=vgg", "there is no model 'vgg'"),
    ("reach", "--models=nonsense", "there is no model 'nonsense'"),
    ("rule", "--models=nonsense", "there is no model 'nonsense'"),
    ("rule", "--part=3/2", "'3/2' is no share such as 1/2"),
    ("service", "--models=resnet51", "there is no model 'resnet51'"),
    ("training", "--cases=resnet51", "there is no case 'resnet51'"),
    ("training", "--ways=apex", "there is no way 'apex'"),
)


@pytest.mark.parametrize(("benchmark", "option", "sentence"), WRONG)
def test_an_option_that_makes_no_sense_is_an_error(benchmark, option, sentence):
    process = run_benchmark(benchmark, option)
    assert process.returncode == 2
    assert sentence in process.stderr
    assert "Traceback" not in process.stderr
