"""
Experts that are uploaded
=========================

In a mixture of experts, a pipeline uploads only the experts that some token was routed to. This page runs a small Mixtral
with batches of several sizes, and compares the uploaded bytes with the bytes of all experts, and with the expectation for
even routing.
"""

# %%
# Bytes of a run
# --------------
#
# Each token is routed to two of eight experts. The first two runs with each number of tokens upload more experts, to
# check that the model does not read experts without tokens; the bytes of the third run are counted.

import matplotlib.pyplot as plt
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from roundpipe_runtime import RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe_runtime.estimate import expected_share

torch.manual_seed(0)
model = MixtralForCausalLM(
    MixtralConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=100,
        use_cache=False,
    )
).eval()
pipe = wrap_model_to_roundpipe(
    model,
    devices="virtual:1",
    model_run_config=RoundPipeRunConfig(num_microbatch=1),
    lower_threshold=0,
)
experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
print(f"{experts / 1e6:.1f} MB of experts")

sizes, shares = [1, 2, 3, 4, 6, 8, 12, 16], []
for count in sizes:
    tokens = torch.randint(0, 100, (1, count))
    for _ in range(3):
        before = pipe.parameter_traffic.skipped
        with torch.no_grad():
            logits = pipe(input_ids=tokens).logits
    shares.append(1 - (pipe.parameter_traffic.skipped - before) / experts)
    print(f"{count:2} tokens: {shares[-1]:.2f} of the experts")

# %%
# Compared with even routing
# --------------------------
#
# If more than three quarters of the experts are needed, all experts are uploaded early, while the device computes.

figure, axis = plt.subplots(figsize=(6, 3))
axis.plot(sizes, shares, "o", label="uploaded")
axis.plot(
    sizes, [expected_share(8, 2, n) for n in sizes], label="expected, even routing"
)
axis.axhline(0.75, color="grey", linewidth=0.8, linestyle="--")
axis.set(xlabel="tokens", ylabel="share of the experts", ylim=(0, 1.05))
axis.legend()
figure.tight_layout()

# %%
# The outputs equal those of the model without a pipeline.

with torch.no_grad():
    print("same bits:", torch.equal(logits, model(input_ids=tokens).logits))
pipe.close()
