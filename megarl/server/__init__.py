"""The embedded generation server: SGLang's HTTP protocol over a transformers causal LM.

    python -m megarl.server --model-path DIR --port P

It stands in for SGLang where SGLang does not run (laptops, CI) and in tests; what it supports it
answers as SGLang 0.5.23 does, what it does not support it refuses with a 4xx that names it.

    args.py              command line
    access.py            who may call: Host, Origin, the job's token
    errors.py            refusals, each with its HTTP status and body; bounds of a request
    sampler.py           counter-based randomness, the batched sampler
    sequence.py          one sequence that is being written, its sampling parameters, its HTTP call
    kv_cache.py          slot KV cache and the attention that reads it
    runner.py            batched prefill and decode over the model; routes, logprobs of prompts
    running.py           the sequences that are being written: prefill, decode, how they end
    scheduler.py         continuous batching, pause, abort: one thread that owns the model
    weights.py           HF names -> tensors; validated loads, checksums
    tensor_lists.py      what an update's body says about its tensors; receiving them
    updates.py           weight-update sessions and process groups
    text.py              tokenizer: stop strings; sequences -> answers, chats -> bodies
    generate.py          /generate: body -> sequences
    core.py              all of the above put together
    replies.py           bodies in and out
    endpoints.py         routes: state, generation, pause
    weight_endpoints.py  routes: weights
    app.py               the app and its life cycle
"""
