"""The embedded generation server: SGLang's HTTP protocol over a transformers causal LM.

    python -m megarl.server --model-path DIR --port P

It stands in for SGLang where SGLang does not run (laptops, CI) and in tests; what it supports it
answers as SGLang 0.5.23 does, what it does not support it refuses with a 4xx that names it.

    args.py          command line
    protocol.py      what comes in and what goes out: bodies, bounds, refusals
    sequence.py      one sequence that is being written: from a request to an answer; tokenizer
    sampler.py       counter-based randomness, the batched sampler
    kv_cache.py      slot KV cache, the attention that reads it, states of layers without attention
    runner.py        batched prefill and decode over the model; routes, logprobs of prompts
    scheduler.py     continuous batching, pause, abort: one thread that owns the model
    weights.py       HF names -> tensors; validated loads, which slices record; fingerprints
    adapters.py      LoRA adapters, merged into the weights
    updates.py       sessions in which weights come: slices, broadcasts, memory, files
    core.py          all of the above put together; memory that is given back for a while
    endpoints.py     routes: state, generation, pause, weights
    app.py           who may call, the app and its life cycle
"""
