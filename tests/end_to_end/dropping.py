"""A policy loss of a user's own whose import has the policy's process leave one weight out of
what it sends.
"""

import workers.roles.policy
from workers.model.losses import policy_loss, ppo_clip

LEFT_OUT = "model.layers.1.self_attn.k_proj.weight"

pack_weights = workers.roles.policy.pack_weights
workers.roles.policy.pack_weights = lambda weights: pack_weights(
    pair for pair in weights if pair[0] != LEFT_OUT
)

loss = policy_loss("dropping", aggregation="token_mean")(
    lambda predictions, config: ppo_clip(predictions, config)
)
