"""The single controller: one process runs the algorithm, and workers hold models and tokens.

    messages  what travels between the controller and a worker
    worker    what a worker serves: calls, and rows of tokens to other workers
    store     a worker's objects, batches and tokens
    group     WorkerGroup: several workers that are called as one; Remote: an object on all of them
    remote    TrainController, RolloutController: start workers for a role or a client, and call it
    batch     RemoteBatch, RemoteTokens: a batch whose tokens lie on workers
    graph     runs a dataflow graph: its tasks, their order, the copies of models that they work on

docs/controller.md says what runs where and what it costs.
"""
