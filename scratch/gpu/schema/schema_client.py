"""Like bench serve, but texts follow a schema (which ignore_eos can't be asked with)."""
import asyncio, json, sys
from graphrt.tools.bench.load import Ask, closed, summary
from graphrt.tools.bench.load_client import Server
from graphrt.tools.bench.load_lengths import lengths_of
url, users, n, schema = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
async def main():
    server = Server(url)
    served = (await server.get("/v1/models"))["data"][0]
    ask = Ask(served["id"], 128256, 0, 0.8, 0, {"top_k": 40, "top_p": 0.95, "ignore_eos": False, "json_schema": schema})
    bodies = [ask.body(i, e) for i, e in enumerate(lengths_of("128:192", users + n, 0))]
    await closed(server, bodies[:users], users, lambda n=1: None)
    answers = await closed(server, bodies[users:], users, lambda n=1: None)
    print(json.dumps({"steps": [summary(answers)]}))
asyncio.run(main())
