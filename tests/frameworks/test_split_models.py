"""A model that transformers splits over ranks, in cells, and what its ranks say when they get other inputs."""

from __future__ import annotations

import re

import pytest

from tests.support.kernel import Kernel

pytestmark = pytest.mark.needs("transformers")

MODEL = """%%distributed
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, pad_token_id=0, eos_token_id=None)
AutoModelForCausalLM.from_config(config).save_pretrained("tiny")  # only rank 0 writes
dist.barrier()
split = DistributedConfig(tp_size=world_size, tp_plan="auto")
model = AutoModelForCausalLM.from_pretrained("tiny", distributed_config=split)
tokens = torch.tensor([[5, 6, 7]])
"""


def test_ranks_that_draw_other_tokens_are_reported_once(two: Kernel) -> None:
    two.ok(MODEL)
    reply = two.ok("""%%distributed
torch.manual_seed(rank)
drawn = model.generate(tokens, do_sample=True, max_new_tokens=8)
drawn = model.generate(tokens, do_sample=True, max_new_tokens=8)
""")
    wanted = r"axon_nb: the inputs of LlamaForCausalLM differ between ranks 0-1 since call \d at line 3, so each rank"
    assert len(re.findall(wanted, reply.shown())) == 1
    assert "Run `%distributed seed 0`" in reply.shown()
    reply = two.ok("%%distributed\nmodel(tokens + rank).logits.shape")
    assert "differ between ranks 0-1 since call 1 at line 2" in reply.shown(), "once in each cell"
    reply = two.ok("""%%distributed
for step in range(100):
    model(tokens + rank * (step == 80))
""")
    assert "differ between ranks 0-1 since one of the calls 65 to 100 at line 3" in reply.shown(), "one call was enough"
    reply = two.ok("%%distributed\nmodel(inputs_embeds=torch.ones(1, 3, 32) * (1 + rank)).logits.shape")
    assert "differ between ranks 0-1 since call 1 at line 2" in reply.shown()
    two.ok("%distributed seed 0")
    reply = two.ok("""%%distributed
drawn = model.generate(tokens, do_sample=True, max_new_tokens=8)
drawn.tolist()
""")
    assert "differ" not in reply.shown()
    assert "[ranks 0-1] [[5, 6, 7" in reply.shown()


def test_unseeded_dropout_is_reported(two: Kernel) -> None:
    two.ok(MODEL)
    reply = two.ok("""%%distributed
drop = nn.Dropout(0.5)
hook = model.train().model.layers[0].mlp.register_forward_hook(lambda module, args, output: drop(output))
torch.manual_seed(rank)
for _ in range(3):
    model(tokens)
hook.remove()
""")
    wanted = "the inputs of lm_head in LlamaForCausalLM differ between ranks 0-1 since call 1 at line 6"
    assert reply.shown().count(wanted) == 1


def test_data_parallel_models_are_not_compared(two: Kernel) -> None:
    two.ok(MODEL)
    reply = two.ok("""%%distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(0)
own = AutoModelForCausalLM.from_config(model.config)
for wrapped in (DDP(copy.deepcopy(own)), fully_shard(copy.deepcopy(own))):
    for _ in range(2):
        wrapped(input_ids=tokens + rank).logits.sum().backward()
""")
    assert "differ" not in reply.shown()


def test_aborted_call_raises_no_false_alarm(two: Kernel) -> None:
    two.ok(MODEL)
    reply = two.run("""%%distributed
model(tokens)
if rank == 1:
    raise ValueError("not called on this rank")
model(tokens)
""")
    assert not reply.ok
    reply = two.ok("%%distributed\nfor _ in range(3):\n    model(tokens)\n")
    assert "differ" not in reply.shown()
    reply = two.ok("%%distributed\nfor _ in range(3):\n    model(tokens + rank)\n")
    assert "differ between ranks 0-1 since call 1 at line 3" in reply.shown()


def test_norms_are_drawn_as_copies(two: Kernel) -> None:
    two.ok(MODEL)
    (shown,) = (text for display in two.ok("%shards model").displays if "tensors on 2 ranks" in (text := str(display)))
    rows = {name: row for row in shown.split("\\n") if (name := row.strip().partition(" ")[0])}
    assert "copies over replica (2)" in rows["model.norm.weight"]
    assert "copies over replica (2)" in rows["model.rotary_emb.inv_freq"]
    assert "rows over tp (2)" in rows["lm_head.weight"]


def test_recorded_values_are_pulled_whole(two: Kernel) -> None:
    two.ok(MODEL)
    reply = two.ok("""%%distributed
from axon_nb import inside

alone = AutoModelForCausalLM.from_pretrained("tiny")
with torch.no_grad(), inside.record(model, "layers.1.self_attn.q_proj", "layers.1.mlp.act_fn") as seen:
    model.generate(tokens, max_new_tokens=3, do_sample=False)
with torch.no_grad(), inside.record(alone, "layers.1.self_attn.q_proj", "layers.1.mlp.act_fn") as wanted:
    alone.generate(tokens, max_new_tokens=3, do_sample=False)
assert [value.shape for value in seen["layers.1.mlp.act_fn"]] == [(1, 3, 64), (1, 1, 64), (1, 1, 64)]
query = torch.cat(seen["layers.1.self_attn.q_proj"], 1)
wanted = torch.cat(wanted["layers.1.self_attn.q_proj"], 1)
seen
""")
    assert "[ranks 0-1] <Recording of 2 places, " in reply.shown()
    two.ok("%pull query wanted --ranks 0\nassert query.shape == (1, 5, 32) and (query - wanted).abs().max() < 1e-5")
    two.ok(
        "%pull seen --ranks 0\nassert list(seen) == ['model.layers.1.self_attn.q_proj', 'model.layers.1.mlp.act_fn']"
    )


TOKENIZER = """%%distributed
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast, TextStreamer

words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")


class Paced(TextStreamer):
    def put(self, value):
        super().put(value)
        self.on_finalized_text(" |", stream_end=True)
        time.sleep(0.05)


import time
"""


def test_text_comes_once_and_an_interrupt_keeps_the_model(two: Kernel) -> None:
    two.ok(MODEL)
    two.ok(TOKENIZER)
    two.ok(
        "%%distributed --out answers\nanswer = model.generate(tokens, max_new_tokens=4, do_sample=False, "
        "streamer=TextStreamer(tokenizer))\nanswer, tokenizer.decode(answer[0])"
    )
    tokens, text = two.value("[answers.values[0][0][0].tolist(), answers.values[0][1]]")
    assert text == " ".join(f"w{token}" for token in tokens)
    assert two.value("answers.text[0]").count(text) >= 1
    request = two.submit("""%%distributed
cache = DynamicCache()
with torch.no_grad():
    model(tokens[:, :2], past_key_values=cache)
model.generate(tokens, max_new_tokens=2000, do_sample=False, past_key_values=cache, streamer=Paced(tokenizer))
""")
    two.wait_for_output(request, "|")
    two.wait_for_output(request, "|")
    two.interrupt()
    reply = two.collect(request)
    assert reply.ename == "CellInterrupt"
    assert 2 <= reply.stdout.count("|") < 1000, "it had begun, and was shown as it came, once for both"
    assert "[ranks 0-1] w" in reply.stdout
    assert "differ" not in reply.shown()
    reply = two.ok("""%%distributed
lengths = [value.shape[-2] for layer in cache.layers for value in (layer.keys, layer.values)]
again = [model.generate(tokens, max_new_tokens=4, do_sample=False, past_key_values=each) for each in (None, cache)]
lengths, [torch.equal(each, answer) for each in again]
""")
    assert "[ranks 0-1] ([2, 2, 2, 2], [True, True])" in reply.shown()


def test_failed_generation_leaves_a_usable_cache(two: Kernel) -> None:
    two.ok(MODEL)
    reply = two.ok("""%%distributed
from transformers import DynamicCache, StaticCache


class Failing:
    calls = 0

    def put(self, value):
        self.calls += 1
        assert self.calls < 4


def answer(cache, **more):
    return model.generate(tokens, max_new_tokens=5, do_sample=False, past_key_values=cache, **more)


results = []
for cache in (DynamicCache(), StaticCache(model.config, max_cache_len=16), DynamicCache(config=model.config)):
    if results:
        with torch.no_grad():
            model(tokens[:, :2], past_key_values=cache)
    try:
        answer(cache, streamer=Failing())
    except AssertionError:
        results.append((cache.get_seq_length() + 0, torch.equal(answer(cache), answer(None))))
[(int(length), same) for length, same in results]
""")
    assert "[ranks 0-1] [(0, True), (0, True), (2, True)]" in reply.shown()


def test_missing_weights_name_the_rank(two: Kernel) -> None:
    two.ok(MODEL)
    reply = two.ok("""%%distributed
import shutil
from safetensors.torch import load_file, save_file

if rank == 1:
    shutil.copytree("tiny", "tiny_part", dirs_exist_ok=True)
    weights = load_file("tiny_part/model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, "tiny_part/model.safetensors", metadata={"format": "pt"})
partly = AutoModelForCausalLM.from_pretrained(["tiny", "tiny_part"][rank], distributed_config=split)
""")
    lines = [line for line in reply.shown().splitlines() if "MISSING" in line]
    assert any("model.layers.1.mlp.up_proj.weight" in line for line in lines)
    assert all(line.startswith("[rank 1]") for line in lines)


@pytest.mark.needs("peft")
def test_adapters_are_loaded_into_a_split_model(two: Kernel) -> None:
    two.ok(MODEL)
    reply = two.ok("""%%distributed
from axon_nb import inside
from peft import LoraConfig, PeftModel, get_peft_model

lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"], init_lora_weights=False)
if rank == 0:
    get_peft_model(AutoModelForCausalLM.from_pretrained("tiny"), lora).save_pretrained("adapter")
dist.barrier()
seen, places = [], ("layers.*", "layers.*.self_attn.q_proj", "layers.*.self_attn:heads", "layers.*.mlp.down_proj:input")
for more in ({}, {"distributed_config": split}):
    adapted = AutoModelForCausalLM.from_pretrained("tiny", **more)
    adapted.load_adapter("adapter")
    with torch.no_grad(), inside.record(adapted, *places) as values:
        adapted(tokens)
    seen.append(values)
max((seen[0][name][0] - seen[1][name][0]).abs().max().item() for name in seen[0]) < 1e-5
""")
    assert "[ranks 0-1] True" in reply.shown()


LOOK = """%%distributed
from axon_nb import inside

model.set_attn_implementation("eager")
places = ("layers.*", "layers.*.self_attn:heads", "layers.0.self_attn:attention", "lm_head")
with torch.no_grad(), inside.record(model, *places) as seen:
    drawn = model.generate(tokens, max_new_tokens=3, do_sample=False)
    best = model(drawn[:, :-1]).logits[0].argmax(-1)
"""


def test_recording_is_shown_and_redrawn(two: Kernel) -> None:
    two.ok(MODEL)
    two.ok(LOOK)
    (bundle,) = two.ok("%inside seen").displays
    text, page = bundle["text/plain"], bundle["text/html"]
    assert text.startswith("seen: 6 places on 2 ranks\n")
    assert "model.layers.0.self_attn:heads: (1, 3, 4, 8), heads split over ranks 0-1; norms" in text
    assert "model.layers.1: (1, 3, 32), whole on each rank; norms" in text
    assert "lens" not in text
    maps = page.split("attention of head ")[1:]
    assert [one.split('title="')[1][: len("rank 0")] for one in maps] == ["rank 0", "rank 0", "rank 1", "rank 1"]
    assert "<script" not in page
    (bundle,) = two.ok("""%%distributed
found = inside.lens(model, seen, lambda token: f"<{token}>")
assert torch.equal(found["model.layers.1"][0][0, -5:], best), "the last block's words are the model's"
""").displays
    assert re.search(r"model.layers.1: .* lens <\d+> <\d+>", bundle["text/plain"]), "the picture is redrawn"
    assert "&lt;5&gt;" in bundle["text/html"], "words are text"
    for name, problem in {"nothing": "does not exist", "tokens": r"\(type Tensor\) is not a recording"}.items():
        reply = two.run(f"%inside {name}")
        assert not reply.ok
        assert re.search(f"UsageError: '{name}' {problem}", reply.shown())


def test_wrong_name_ends_the_cell_with_one_sentence(two: Kernel) -> None:
    two.ok(MODEL)
    reply = two.run("""%%distributed
from axon_nb import inside

with inside.replace(model, {"layers.*.self_atn": 0.0}):
    model(tokens)
""")
    assert not reply.ok
    assert "UsageError: no module of this rank is named 'layers.*.self_atn'; there are" in reply.shown()
