"""Parts of `graphrt serve`: an OpenAI-compatible server over a PagedEngine.

app, routes_*   HTTP: Starlette's routes, which check a request and make Texts of it (on the event loop)
schemas         what a request's body may hold
texts           from a checked request to Texts
worker          the one thread that owns the engine; Texts go in, Events come out
scheduler       which Texts a step reads; no threads, no HTTP
fair_queue      who is next
"""
