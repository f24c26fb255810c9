#!/usr/bin/env -S python3 -B
"""The options of training on the emulated GPU, each against the same run on the CPU.

usage: options.py NIBBLE [full]

With activations in f32, losses are equal to 1e-3. A weight that NVFP4 rounds to its other neighbour,
or a difference of the scalar loss that gets the other sign, moves the losses of so small a model by
more than that in the end. So runs of many steps ("full") have bf16 weights where four bits are not
what they are about; those in nvfp4 are short, and those of the scalar loss learn slowly."""
import json
import os
import shutil
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)) + "/../cli")
import training as t  # noqa: E402

STEPS_SHORT, STEPS_FULL = 3, 20

# The least memory, for cards of 16 GB: nothing that can be made again is kept.
LEAST = ("--fused-step", "--head-slices", "--recompute", "block", "--weight-store", "scales",
         "--master-dtype", "bf16", "--optimizer-state-mode", "nvfp4")

# Options by what they are about. DIR/ is the directory of the test.
SHORT = {
    "recomputation, pieces of matrices": (
        "--recompute", "block", "--step-chunk-rows", 24, "--optimizer-state-mode", "nvfp4",
        "--master-dtype", "f32"),
    "fused step": ("--fused-step", "--recompute", "block", "--precision", "bf16"),
    "the last layer": ("--train-last-layers", 1, "--precision", "f32", "--optimizer-state-mode",
                       "f32", "--weight-decay", 0.1, "--grad-clip", 0),
    "distillation of replay": ("--replay", "DIR/c.jsonl:0.5", "--kl-base", 0.5,
                               "--optimizer-state-mode", "bf16"),
    "scalar loss, micro-batches": ("--loss", "scalar", "--grad-accum", 2, "--clip-by-layer"),
    "two levels of scales": ("-m", "DIR/two", "--fused-step"),
    "odd sizes": ("-m", "DIR/odd"),
    "the least memory": LEAST,
}
FULL = {
    "recomputation": ("--recompute", "block"),
    "fused step": ("--fused-step",),
    "fused step, pieces": ("--fused-step", "--step-chunk-rows", 7, "--recompute", "block"),
    "pieces of matrices": ("--step-chunk-rows", 24),
    "the last layer": ("--train-last-layers", 1),
    "the last layer, fused": ("--train-last-layers", 1, "--fused-step"),
    "replay": ("--replay", "DIR/b.txt:0.25"),
    "distillation": ("-d", "DIR/c.jsonl", "--kl-base", 0.5),
    "distillation of replay": ("--replay", "DIR/c.jsonl:0.5", "--kl-base", 0.5),
    "scalar loss": ("--loss", "scalar", "--lr", "1e-4"),
    "scalar loss, fused": ("--loss", "scalar", "--fused-step", "--lr", "1e-4"),
    "micro-batches": ("--grad-accum", 3),
    "micro-batches, recomputation": ("--grad-accum", 2, "--recompute", "block"),
    "clipping by layer": ("--clip-by-layer",),
    "decay and schedule": ("--weight-decay", 0.1, "--grad-clip", 0, "--warmup", 3, "--schedule",
                           "linear"),
    "order of the data": ("--sample-mode", "sequential"),
    "random weights": ("--from-scratch",),
    "head in slices": ("-m", "DIR/large", "--fused-step", "--head-slices", "--grad-clip", 0.5),
    "head in slices, distillation": ("-m", "DIR/large", "--fused-step", "--head-slices",
                                     "--replay", "DIR/c.jsonl:0.5", "--kl-base", 0.5),
    "a head of its own": ("-m", "DIR/untied"),
    "odd sizes": ("-m", "DIR/odd"),
}


class Options:
    """A few models and texts, on which a program trains."""

    def __init__(self, nibble, work, full):
        self.nibble, self.work = nibble, work
        self.steps = STEPS_FULL if full else STEPS_SHORT
        t.make_data(work)
        with open(work + "/prompts.txt", "w", encoding="ascii") as f:
            f.write("the cat\n")
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        t.make_model(nibble, work + "/model", head_dim=64, **heads)
        t.make_model(nibble, work + "/untied", head_dim=64, tie_word_embeddings=False, **heads)
        t.make_model(nibble, work + "/odd", hidden_size=48, intermediate_size=80,
                     num_attention_heads=3, num_key_value_heads=1)
        if full:  # two slices
            t.make_model(nibble, work + "/large", head_dim=64, vocab_size=8352, **heads)
        t.run(nibble, "quantize", "-q", "--two-level", work + "/model", work + "/two")

    def arguments(self, name, device, *more):
        """Of a run whose log has this name."""
        more = [str(a).replace("DIR", self.work) for a in more]
        for key, value in (("-m", self.work + "/model"), ("-d", self.work + "/a.txt"),
                           ("--lr", "1e-3"), ("--steps", self.steps)):
            if key not in more:
                more += [key, value]
        return ["--json", "--seq-len", 16, "--batch-size", 2, "--device", device,
                "--log", f"{self.work}/{name}.jsonl", *more]

    def train(self, name, device, *more):
        """The result of a run, and the losses of its steps."""
        out, said = t.run(self.nibble, "train", *self.arguments(name, device, *more))
        lines = t.log(f"{self.work}/{name}.jsonl")
        return json.loads(out), [float(x["loss"]) for x in lines if "loss" in x], said

    def compare(self, what, *more, bf16=False):
        """f32 activations step by step; bf16 within what rounding does."""
        _, want, _ = self.train("cpu", "cpu", *more)
        for compute, limit in (("f32", 1e-3), ("bf16", 2e-2))[:1 + bf16]:
            result, got, said = self.train("cuda", "cuda", "--compute-dtype", compute, *more)
            assert "on cuda:0" in said and result["device"] == "cuda:0", said
            assert result["plan"]["compute_dtype"] == compute, result
            assert len(got) == len(want) == self.steps
            off = max(abs(a - b) for a, b in zip(want, got))
            print(f"{what}, {compute} activations: losses differ by up to {off:.2g} "
                  f"of {want[0]:.3f} to {want[-1]:.3f}", flush=True)
            assert off < limit, (what, want, got)

    def types(self):
        """All precisions, masters and states."""
        for precision in t.PRECISIONS:
            self.steps = 4 if precision == "nvfp4" else STEPS_FULL
            for master in ("f32", "bf16"):
                for state in t.STATES:
                    self.compare(f"{precision}, {master} masters, {state} states",
                                 "--precision", precision, "--master-dtype", master,
                                 "--optimizer-state-mode", state, bf16=precision != "f32")

    def whole_run(self):
        """Evaluation, test prompts, export, reports; the exported model is the one that was
        measured, and says what the run says that it says."""
        prompts = self.work + "/prompts.txt"
        out, report = self.work + "/out", self.work + "/memory.json"
        r, _, _ = self.train("whole", "cuda", "-o", out, "--eval-data", self.work + "/held.txt",
                             "--eval-every", 2, "--test-prompts", prompts, "--vram-report", report,
                             "--stop-if-ppl-rises", 50)
        ppl = json.loads(t.run(self.nibble, "eval", "ppl", "-q", "--json", "-m", out, "--text",
                               self.work + "/held.txt", "--ctx", 16, "--device", "cpu")[0])["ppl"]
        assert abs(r["eval"]["ppl"] / ppl - 1) < 2e-2, (r["eval"], ppl)
        said = t.run(self.nibble, "generate", "-q", "-m", out, "-p", "the cat", "-n", 64, "--temp",
                     0, "--exact", "--kv-dtype", "f32", "--device", "cpu")[0]
        assert r["answers"][0]["after"].strip() == said.strip(), (r["answers"], said)
        with open(out + "/report.html", encoding="utf-8") as f:
            assert "cuda:0" in f.read()
        with open(report, encoding="utf-8") as f:
            samples = json.load(f)["Samples"]
        assert len(samples) == 6 and samples[0]["Parts"].keys() == {"context"}, samples
        plan = r["plan"]
        for sample in samples[1:]: # the emulated driver counts bytes as they are asked for
            parts = sample["Parts"]
            for name in ("masters", "moments", "gradients", "weights"):
                assert abs(parts[name] * 2**20 - plan[name]) < 1, (name, parts, plan)
            cache = parts.get("key/value cache", 0)  # of the test prompts, once they are asked
            both = parts["activations"] + parts["scratch"] + parts["stages"] + cache
            want = plan["activations"] + plan["scratch"] + (plan["prompts"] if cache else 0)
            assert abs(both * 2**20 - want) < 1, (parts, plan)
            assert abs(sum(parts.values()) - sample["PidMemoryMiB"]) < 1e-6, sample
            assert sample["PidMemoryMiB"] == sample["TotalMemoryMiB"] and sample["HostMemoryMiB"] > 1
            assert parts["context"] == 0 and parts["stages"] > 1, parts
        taken = {x.get("device_bytes") for x in t.log(self.work + "/whole.jsonl") if "loss" in x}
        assert len(taken) == 1 and taken.pop() > samples[-1]["PidMemoryMiB"] * 2**20

    def stores(self, model, compute, *stores, prompts=()):
        """Whatever is kept of NVFP4 weights, model, losses, evaluations and answers are the same."""
        results = []
        for store in ("codes", *stores):
            out = f"{self.work}/{store}"
            r, losses, _ = self.train(
                store, "cuda", "-m", model, "-o", out, "--weight-store", store, "--compute-dtype",
                compute, "--eval-data", self.work + "/held.txt", "--steps", 2, *prompts)
            results.append((losses, r["eval"], r.get("answers"),
                            t.read(out + "/model.safetensors")))
            shutil.rmtree(out)
        assert all(r == results[0] for r in results), (model, compute)
        print(f"weights as {', '.join(stores)}: the same as codes, {compute} activations", flush=True)

    def least_memory(self, *more):
        """With bf16 for gradients and activations in addition: near the CPU in the same mode, and a
        run that goes on from a checkpoint ends with the bytes of one that never stopped."""
        mode = (*LEAST, "--grad-dtype", "bf16", "--compute-dtype", "bf16", "--schedule",
                "constant", *more)
        ends, last = [], min(self.steps, 4)
        for name, device, steps in (("cpu", "cpu", last), ("straight", "cuda", last),
                                    ("resumed", "cuda", 1), ("resumed", "cuda", last)):
            ck = f"{self.work}/{name}.ck"
            _, got, _ = self.train(name, device, "--checkpoint-dir", ck, "--resume", *mode,
                                   "--steps", steps)
            ends.append((got, f"{ck}/step-{steps:08}.ckpt"))
        (want, _), (got, straight), _, (_, resumed) = ends
        off = max(abs(a - b) for a, b in zip(want, got))
        print(f"the least memory, bf16 activations: losses differ by up to {off:.2g} "
              f"of {want[0]:.3f} to {want[-1]:.3f}", flush=True)
        assert len(got) == last and off < 2e-2, (want, got)
        t.same_checkpoint(straight, resumed)
        for name in ("cpu", "straight", "resumed"):
            shutil.rmtree(f"{self.work}/{name}.ck")

    def bench(self):
        """Measures the device that trains, which auto picks."""
        out, said = t.run(self.nibble, "bench", "train", "--json", "--config",
                          self.work + "/model.json", "--seq-len", 16, "--batch-size", 1, "--steps",
                          1)
        result = json.loads(out)
        assert result["device"] == "cuda:0" and result["compute_dtype"] == "bf16", result
        assert result["peak_tflops"] > 0 and "on cuda:0" in said, (result, said)

    def whoami(self):
        """Questions, training and gates, all on the device that auto picks."""
        out, said = t.run(self.nibble, "whoami", "--json", "-m", self.work + "/model", "-o",
                          self.work + "/ada", "--target", "I am Ada.", "--languages", "en",
                          "--count", 100, "--samples", 2, "-n", 2, "--questions", 2, "--steps", 2,
                          "--seq-len", 32, "--batch-size", 2, code=1)
        result = json.loads(out)
        assert result["steps"] == 2 and result["identity"] == 40, result
        assert len(result["gates"]["gates"]) >= 5 and "on cuda:0: 2 steps" in said, (result, said)

    def not_finite(self):
        """Steps whose gradients are not finite are skipped and counted, and ten in a row end the
        run with a checkpoint; the same ones as on the CPU."""
        over = ("--lr", 100, "--weight-decay", 100, "--schedule", "constant", "--grad-clip", 0,
                "--steps", 40, "--precision", "bf16")
        ends = {}
        for device in ("cpu", "cuda"):
            ck = f"{self.work}/{device}.ck"
            _, said = t.run(self.nibble, "train",
                            *self.arguments("over", device, "--checkpoint-dir", ck, *over), code=1)
            assert "the gradients of the last 10 steps were not finite" in said, said
            (ends[device],) = t.steps(ck)
            state = t.checkpoint(f"{ck}/step-{ends[device]:08}.ckpt")
            assert state["skipped"] >= state["skipped_in_row"] == 10, state["skipped"]
        assert ends["cpu"] == ends["cuda"], ends
        print(f"ten steps in a row without a finite gradient: the run ended after {ends['cpu']}")


def main():
    """A few combinations, or every option by itself."""
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["full"]):
        sys.exit("usage: options.py NIBBLE [full]")
    full = sys.argv[2:] == ["full"]
    with tempfile.TemporaryDirectory() as work:
        options = Options(sys.argv[1], work, full)
        for what, more in SHORT.items() if not full else ():
            options.compare(what, *more)
        for what, more in FULL.items() if full else ():
            options.compare(what, "--precision", "bf16", *more, bf16=True)
        options.stores("DIR/two", "bf16", "scales")
        options.least_memory()
        if full:
            options.least_memory("-m", "DIR/large")
            for compute in ("f32", "bf16"):
                options.stores("DIR/model", compute, "bf16", "scales",
                               prompts=("--test-prompts", "DIR/prompts.txt"))
                options.stores("DIR/untied", compute, "scales")
        options.whole_run()
        options.not_finite()
        options.bench()
        if full:
            options.types()
            options.whoami()


if __name__ == "__main__":
    main()
