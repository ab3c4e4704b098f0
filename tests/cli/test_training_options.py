"""Accumulation, averages, groups, precision and units of schedules, by bindings."""

import json

OPTIONS = (
    "Training.accumulate = 2",
    "Training.evaluate_weights = 'ema'",
    "Training.non_finite = 'rewind'",
    "Optimizer.ema_decay = 0.5",
    "Optimizer.update = @Lion",
    "Optimizer.groups = (@kernels/Group, @norms/Group)",
    "kernels/Group.pattern = '*.kernel'",
    "kernels/Group.update = @AdamW",
    "norms/Group.pattern = '*norm*'",
    "norms/Group.rate = 0.5",
    "AdamW.weight_decay = 0.1",
    "Decoder.compute_dtype = 'bfloat16'",
    "Cosine.unit = 'epochs'",
    "Cosine.total = 0.03",
    "WARMUP = 0.02",
)


def test_options_of_training_are_bindings(lra, workplace):
    sets = [word for value in OPTIONS for word in ("--set", value)]
    trained = lra("train", "tiny.gin", "--json", *sets)
    assert trained.status == 0, trained.err
    outcome = json.loads(trained.out)
    assert (outcome["step"], outcome["valid"]["weights"]) == (4, "ema")
    assert 0 < outcome["train"]["clip_ratio"] <= 1
    lines = [json.loads(line) for line in (workplace / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    # About 90 batches are an epoch: 2 steps of warm-up, and the end after 3.
    assert [round(line["learning_rate"], 5) for line in lines if line["split"] == "train"] == [0.0015, 0.003, 0.003, 0]
    scores = {}
    for weights in ("last", "ema"):
        report = lra("eval", "tiny", "--weights", weights, "--json")
        assert report.status == 0, report.err
        assert json.loads(report.out)["weights"] == weights
        scores[weights] = json.loads(report.out)["bits_per_byte"]
    assert scores["last"] != scores["ema"]
    resolved = lra("config", "runs/tiny")
    assert resolved.out == (workplace / "runs/tiny/config.gin").read_text()


def test_weights_that_a_run_does_not_keep_are_refused(trained, lra):
    refused = lra("eval", "tiny", "--weights", "ema")
    assert (refused.status, refused.out) == (2, "")
    assert "keeps no moving average" in refused.err
    assert refused.err.count("\n") == 1
