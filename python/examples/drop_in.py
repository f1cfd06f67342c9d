"""An existing model with Encke in the place of its attention: one line of it changes."""
import torch
from torch import nn

# from dilated_attention_pytorch import MultiheadDilatedAttention
from encke.nn import MultiheadDilatedAttention

model = nn.ModuleList([MultiheadDilatedAttention(256, 8, [1, 2, 4], [512, 1024, 2048]) for _ in range(2)])
x = torch.randn(1, 3000, 256)  # Any length: no multiple of a segment is asked for.
for layer in model:
    x = x + layer(x, x, x, is_causal=True)[0]
x.mean().backward()
print(x.shape, "every parameter has a gradient:", all(p.grad is not None for p in model.parameters()))
