"""An existing model with Encke's attention: only the import changes."""
import torch
from torch import nn

# from dilated_attention_pytorch import MultiheadDilatedAttention
from encke.nn import MultiheadDilatedAttention

pattern = dict(dilation_rates=[1, 2, 4], segment_lengths=[512, 1024, 2048])
model = nn.ModuleList([MultiheadDilatedAttention(256, 8, **pattern) for _ in range(2)])
x = torch.randn(1, 3000, 256)  # Any length, not only multiples of a segment.
for layer in model:
    x = x + layer(x, x, x, is_causal=True)[0]
x.mean().backward()
complete = all(p.grad is not None for p in model.parameters())
print(x.shape, "every parameter has a gradient:", complete)
