"""The classes of torch that a ds_config may name, and the arguments of each, as tests/contract finds them."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What is none of DeepSpeed's own optimizers is looked up in torch.optim by its exact name.
TORCH_OPTIMIZERS: dict[str, frozenset[str]] = {
    "ASGD": _names("alpha capturable differentiable foreach lambd lr maximize t0 weight_decay"),
    "Adadelta": _names("capturable differentiable eps foreach lr maximize rho weight_decay"),
    "Adafactor": _names("beta2_decay d eps foreach lr maximize weight_decay"),
    "Adamax": _names("betas capturable differentiable eps foreach lr maximize weight_decay"),
    "LBFGS": _names("history_size line_search_fn lr max_eval max_iter tolerance_change tolerance_grad"),
    "NAdam": _names(
        "betas capturable decoupled_weight_decay differentiable eps foreach lr maximize "
        "momentum_decay weight_decay"
    ),
    "RAdam": _names(
        "betas capturable decoupled_weight_decay differentiable eps foreach lr maximize weight_decay"
    ),
    "RMSprop": _names(
        "alpha capturable centered differentiable eps foreach lr maximize momentum weight_decay"
    ),
    "Rprop": _names("capturable differentiable etas foreach lr maximize step_sizes"),
    "SGD": _names("dampening differentiable foreach fused lr maximize momentum nesterov weight_decay"),
    "SparseAdam": _names("betas eps lr maximize"),
}
# Not among DeepSpeed's own, a scheduler's name is looked up in torch.optim.lr_scheduler.
TORCH_SCHEDULERS: dict[str, frozenset[str]] = {
    "ConstantLR": _names("factor last_epoch total_iters"),
    "CosineAnnealingLR": _names("T_max eta_min last_epoch"),
    "CosineAnnealingWarmRestarts": _names("T_0 T_mult eta_min last_epoch"),
    "CyclicLR": _names(
        "base_lr base_momentum cycle_momentum gamma last_epoch max_lr max_momentum mode scale_fn "
        "scale_mode step_size_down step_size_up"
    ),
    "ExponentialLR": _names("gamma last_epoch"),
    "LambdaLR": _names("last_epoch lr_lambda"),
    "LinearLR": _names("end_factor last_epoch start_factor total_iters"),
    "MultiStepLR": _names("gamma last_epoch milestones"),
    "MultiplicativeLR": _names("last_epoch lr_lambda"),
    "OneCycleLR": _names(
        "anneal_strategy base_momentum cycle_momentum div_factor epochs final_div_factor last_epoch "
        "max_lr max_momentum pct_start steps_per_epoch three_phase total_steps"
    ),
    "PolynomialLR": _names("last_epoch power total_iters"),
    "ReduceLROnPlateau": _names("cooldown eps factor min_lr mode patience threshold threshold_mode"),
    "StepLR": _names("gamma last_epoch step_size"),
}
NEEDED_TORCH_PARAMS: dict[str, tuple[str, ...]] = {
    "CosineAnnealingLR": ("T_max",),
    "CosineAnnealingWarmRestarts": ("T_0",),
    "CyclicLR": ("base_lr", "max_lr"),
    "ExponentialLR": ("gamma",),
    "LambdaLR": ("lr_lambda",),
    "MultiStepLR": ("milestones",),
    "MultiplicativeLR": ("lr_lambda",),
    "OneCycleLR": ("max_lr",),
    "StepLR": ("step_size",),
}
