"""What scripts do between steps, as text. `$names` are drawn from `CHOICES`; a step on some batch follows each statement.

Scripts have `model`, `plain` (which one process trains itself), `optimizer`, `batches`, `loss_on(number)` of a batch,
`step(number)`, `update()` (the optimizer's step and its zero_grad), `note(value)` for numbers that are compared, and `fresh()`
for another model with other weights. A line that ends with ``;`` goes on.
"""

from __future__ import annotations

CHOICES: dict[str, tuple[str, ...]] = {
    "square": ("a", "b"),
    "part": ("a", "b", "head"),
    "factor": ("0.0", "0.5", "2.0"),
    "batch": ("0", "1", "2", "3"),
    "odd": ("4", "5"),
    "bool": ("True", "False"),
    "rate": ("0.01", "0.1"),
    "optimizer": ("SGD", "AdamW", "Adam", "Adagrad", "RMSprop"),
    "init": ("zeros_", "ones_"),
    "act": ("nn.Tanh()", "nn.Identity()"),
}

ATTRIBUTES = """
model.alpha = $factor
model.alpha *= 0.5
model.config.alpha = $factor
model.drop.p = $bool * 1.0
model.remark = "second phase"
model.act = $act
model.$square = nn.Linear(16, 16).double()
model.head = nn.Linear(16, 4).double(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.$square.weight = nn.Parameter(torch.eye(16) * $factor)
model.b.weight = model.a.weight
model.t = torch.full((16,), $factor)
model.register_buffer("t", torch.full((16,), $factor))
model.extra = nn.Parameter(torch.ones(3)); note(len(list(model.parameters())))
del model.drop
model.forward = model.forward
"""

VALUES = """
with torch.no_grad(): model.$part.weight.mul_($factor)
with torch.no_grad(): model.$part.weight.add_(torch.ones_like(model.$part.weight), alpha=0.01)
with torch.no_grad(): model.$part.bias.fill_($factor)
with torch.no_grad(): model.t.fill_($factor)
model.t *= 0.5
model.$part.weight.data.mul_($factor)
model.$part.weight.data = model.$part.weight.data * $factor
model.$part.weight.data = torch.ones_like(model.$part.weight.data) * 0.1
model.$part.weight.data.clamp_(-0.1, 0.1)
model.$part.weight.detach().mul_($factor)
model.$part.weight.detach().clone().zero_()
nn.init.$init(model.$square.weight)
nn.init.constant_(model.$part.bias, 0.1)
nn.init.normal_(model.$square.weight); note(distinct(model.$square.weight)); nn.init.constant_(model.$square.weight, 0.1)
note(distinct(torch.randn_like(model.$square.weight)))
note(distinct(torch.rand_like(model.$square.weight.data)))
model.apply(lambda each: nn.init.zeros_(each.bias) if isinstance(each, nn.Linear) else None)
nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.5, model.parameters())
note(nn.utils.parameters_to_vector(model.parameters()).norm())
plain.load_state_dict(fresh().state_dict())
model.load_state_dict(fresh().state_dict())
"""

GRADIENTS = """
loss_on($batch).backward()
loss_on($batch).backward(); model.zero_grad()
loss_on($batch).backward(); optimizer.zero_grad(set_to_none=$bool)
loss_on($batch).backward(); [p.grad.zero_() for p in model.parameters() if p.grad is not None]
for p in model.parameters(): p.grad = None
loss_on($batch).backward(); note(nn.utils.clip_grad_norm_(model.parameters(), 0.1)); update()
loss_on($batch).backward(); nn.utils.clip_grad_value_(model.parameters(), 0.01); update()
loss_on($batch).backward(); [p.grad.mul_(0.5) for p in model.parameters() if p.grad is not None]; update()
loss_on($batch).backward(); note(model.$part.weight.grad.norm()); optimizer.zero_grad()
(loss_on($batch) / 2).backward(); (loss_on($batch) / 2).backward(); update()
(loss_on(0) + loss_on(1)).backward(); update()
loss_on(0); loss_on(1).backward(); update()
(loss_on($batch) + 0.01 * sum(p.square().sum() for p in model.parameters())).backward(); update()
loss_on($batch).backward(); model.$part.weight.grad = model.$part.weight.grad * 2; update()
loss_on($batch).backward(); model.$part.weight.grad = None; update()
with torch.no_grad(): [p.sub_(0.01 * p.grad) for p in model.parameters() if p.grad is not None]
model.$part.weight.register_hook(lambda gradient: gradient * 0)
optimizer.zero_grad(); note(loss_on($batch).detach())
"""

FREEZING = """
model.$part.requires_grad_(False)
model.$part.requires_grad_(True)
model.requires_grad_(True)
model.requires_grad_(False); model.head.requires_grad_(True)
for p in model.$part.parameters(): p.requires_grad = $bool
model.a.weight.requires_grad = False; optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=$rate)
"""

MODES = """
model.eval()
model.train()
model.train($bool)
model.norm.eval()
model.drop.train($bool)
model.eval(); note(loss_on($batch)); model.train()
with torch.no_grad(): note(loss_on($batch))
with torch.inference_mode(): note(loss_on($batch))
with torch.autocast("cpu", torch.bfloat16): note(loss_on($batch))
with torch.autocast("cpu", torch.bfloat16): loss_on($batch).backward(); update()
with torch.set_grad_enabled($bool): note(loss_on($batch))
note(loss_on($odd))
loss_on($odd).backward(); update()
note(loss_of(torch.func.functional_call(model, dict(model.named_parameters()), (), batches[0]), 0))
"""

OPTIMIZERS = """
optimizer = torch.optim.$optimizer(model.parameters(), lr=$rate)
optimizer = torch.optim.SGD(model.parameters(), lr=$rate, momentum=0.9, nesterov=True)
optimizer = torch.optim.$optimizer([p for p in model.parameters() if p.requires_grad], lr=$rate)
groups = [[p for p in model.parameters() if (p.dim() > 1) == each] for each in (True, False)];
  optimizer = torch.optim.AdamW([{"params": each} for each in groups], lr=$rate)
optimizer = torch.optim.SGD(model.$part.parameters(), lr=$rate)
optimizer = torch.optim.SGD(model.$part.parameters(), lr=$rate);
  optimizer.add_param_group({"params": list(model.norm.parameters())})
optimizer = torch.optim.SGD(plain.parameters(), lr=$rate)
for group in optimizer.param_groups: group["lr"] *= 0.1
for group in optimizer.param_groups: group["weight_decay"] = 0.1
optimizer.state.clear()
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5); optimizer.step(); scheduler.step()
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4); optimizer.step(); scheduler.step(); scheduler.step()
optimizer.step()
optimizer.step(lambda: (optimizer.zero_grad(), loss_on($batch), loss_on($batch).backward())[1])
scaler = torch.amp.GradScaler("cpu"); scaler.scale(loss_on($batch)).backward();
  scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
"""

STATES = """
saved = copy.deepcopy(model.state_dict()); step($batch); model.load_state_dict(saved)
saved = {name: value.clone() for name, value in model.state_dict().items()}; step($batch); model.load_state_dict(saved)
saved = copy.deepcopy(optimizer.state_dict()); step($batch); optimizer.load_state_dict(saved)
optimizer.load_state_dict(optimizer.state_dict())
model.load_state_dict({**model.state_dict(), "t": torch.ones(16)})
model.load_state_dict({"t": torch.ones(16)}, strict=False)
file = io.BytesIO(); torch.save(optimizer.state_dict(), file); step($batch);
  file.seek(0); optimizer.load_state_dict(torch.load(file, weights_only=False))
ema = copy.deepcopy(model); step($batch); note(result_loss(ema, $batch))
ema = copy.deepcopy(model).requires_grad_(False); step($batch);
  ema.$part.weight.data.lerp_(model.$part.weight.data, 0.1); note(result_loss(ema, 0))
ema = torch.optim.swa_utils.AveragedModel(model); step($batch); ema.update_parameters(model); note(result_loss(ema, $batch))
shadow = {name: p.detach().clone() for name, p in model.named_parameters()}; step($batch);
  [p.data.copy_(shadow[name]) for name, p in model.named_parameters()]
with torch.no_grad(): [q.mul_(0.9).add_(p, alpha=0.1) for q, p in zip(copy.deepcopy(model).parameters(), model.parameters())]
note(sum(p.numel() for p in model.parameters() if p.requires_grad))
note(max(float(p.abs().max()) for p in model.parameters()))
note(sum(value.double().sum() for value in model.state_dict().values()))
model.to(torch.float64)
model.float()
model.zero_grad(set_to_none=$bool)
"""

PARTS = """
nn.init.eye_(model.$square.weight)
with torch.no_grad(): model.$square.weight.copy_(torch.eye(16))
with torch.no_grad(): model.$square.weight[0] = 0.5
with torch.no_grad(): model.$square.weight[1:3, 2].mul_(0.5)
with torch.no_grad(): model.$square.weight[torch.tensor([0, 3])] = 0.25
model.$square.weight.data[2].zero_()
model.$square.weight.data.copy_(torch.eye(16))
plain.$part.weight.data.mul_(0.5)
with torch.no_grad(): [p.copy_(q) for p, q in zip(model.parameters(), fresh().parameters())]
with torch.no_grad(): [p.lerp_(q, 0.5) for p, q in zip(model.parameters(), fresh().parameters())]
found = torch.autograd.grad(loss_on($batch), [model.$part.weight]); note(found[0].norm())
found = torch.autograd.grad(loss_on($batch), list(model.parameters()), allow_unused=True); note(found[0].norm())
note(model.a(batches[$batch]["x"]).sum())
note(model.head(model.norm(batches[0]["x"])).abs().sum())
"""

GRAMMAR = {
    kind: text.strip().replace(";\n  ", "; ").splitlines()
    for kind, text in {
        "attributes": ATTRIBUTES, "values": VALUES, "gradients": GRADIENTS, "freezing": FREEZING, "modes": MODES,
        "optimizers": OPTIMIZERS, "states": STATES, "parts": PARTS,
    }.items()
}  # fmt: skip
