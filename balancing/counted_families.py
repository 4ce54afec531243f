"""List the families whose layers `balancing.model_counts` counts within 2 % of transformers' own modules.

tests/balancing/test_model_counts.py compares them. Others are counted on modules without storage.
"""

NAMES = """
afmoe apertus arcee aria_text axk1 bamba bert bert-generation biogpt bitnet bloom camembert codegen cohere
cohere2 cohere2_moe cohere_compass_text ctrl cwm data2vec-text deepseek_v2 deepseek_v3 diffllama dots1
electra ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo gemma
gemma2 gemma3_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite
glm4v_moe_text glm4v_text glm_ocr_text gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss
gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium
hunyuan_v1_dense hy_v3 hyperclovax jais2 jamba kimi_linear laguna lfm2 lfm2_moe llama llama4 llama4_text
mamba mamba2 megatron-bert mellum minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3
mistral mixtral mllama_text_model mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid
olmoe openai-gpt opt paddleocr_vl_text persimmon phi phi3 phimoe qwen2 qwen2_5_omni_text qwen2_5_vl
qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
qwen3_moe qwen3_next qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text roberta roberta-prelayernorm
roformer seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xglm xlm xlm-roberta xlm-roberta-xl
youtu
"""
COUNTED_FAMILIES = frozenset(NAMES.split())
"""Model types of config.json, or of its text_config."""
