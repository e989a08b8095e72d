"""Model: a loaded GGUF file with its tokenizer, ready to open sessions, generate text and give logits."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import numpy as np
import numpy.typing as npt
import torch

from graphrt.arguments import checked
from graphrt.backend import Backend, get_backend
from graphrt.errors import ModelError, SessionError
from graphrt.models.adapters import Adapters, read_adapter
from graphrt.models.arch import architecture
from graphrt.models.arch.encoder import Encoder
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.arch.transformer import Transformer
from graphrt.models.chat import KEY as TEMPLATE_KEY
from graphrt.models.chat import ChatTemplate, start_soon
from graphrt.models.chat import from_metadata as chat_from_metadata
from graphrt.models.choices import text
from graphrt.models.embed import HOST_BATCH, Embedder, check_pooling
from graphrt.models.embed_decoder import embed
from graphrt.models.engine import Engine, SessionOptions, check_options
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.generation import Piece as Piece
from graphrt.models.generation import Pieces, TextRules
from graphrt.models.gguf import GGUFFile
from graphrt.models.grammar import GrammarVocab
from graphrt.models.hparams import Keys
from graphrt.models.placement import for_weights
from graphrt.models.ranks.adapters import use_adapters
from graphrt.models.ranks.network import network_of
from graphrt.models.ranks.played import PlayedDecoder
from graphrt.models.rope_options import RopeOptions
from graphrt.models.samples import MAX_SAMPLES, samples
from graphrt.models.sampling import Sampler
from graphrt.models.sampling_params import SamplerOptions, SamplerParams, spells_out
from graphrt.models.session import Session
from graphrt.models.step import Logits
from graphrt.models.tokenizer import Tokenizer
from graphrt.presence import here
from graphrt.printing import brief, brief_name, human_bytes
from graphrt.progress import task
from graphrt.ranks import Ranks

log = logging.getLogger(__name__)

MAX_NAMED = 20  # keys in a warning


class Model:
    """A model in a backend's memory. Make it with load(). Several threads may use one model, or several, at the same
    time, each thread with a session of its own (generate() makes a new one by default). file: the GGUF file; network:
    its architecture and weights, a decoder or an encoder; backends: those that run it, the preferred first; ranks,
    stages, ep: as in load()."""

    def __init__(
        self, file: GGUFFile, backends: Sequence[Backend], ranks: Ranks | int = 1, stages: int = 1, ep: bool = False
    ) -> None:
        self.file = file
        self.backends = list(backends)
        keys = Keys(file)
        cls = architecture(keys.arch)
        hp = cls.read(keys)
        unread = keys.unread()
        if unread:
            named = [f"{keys.arch}.{brief_name(key)} = {brief(value)}" for key, value in unread.items()]
            more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
            listed = ", ".join(named[:MAX_NAMED])
            log.warning("%s%s: %s models here make no use of these keys", listed, more, keys.arch)
        nbytes = sum(t.nbytes for t in file.tensors.values())
        with here.at_length(), task("loading", nbytes, "bytes") as advance:
            home = for_weights(self.backends)
            self.network: Transformer = network_of(cls, hp, file, home, ranks, advance, stages, ep)
        self.ranks = ranks if isinstance(ranks, Ranks) else None
        self.weights = self.network.weights

    def __repr__(self) -> str:
        hp, names = self.network.hp, ", ".join(dict.fromkeys(b.id for b in self.backends))
        name = self.file.metadata.get("general.name")
        shown = f" {brief_name(name)!r}" if isinstance(name, str) and name else ""
        n = sum(t.n_elements for t in self.weights.loaded.values())
        weights = f"{n / 1e9:.2f} billion" if n >= 1e9 else f"{n / 1e6:.2f} million"
        return (
            f"<Model{shown} of architecture {hp.arch}: {hp.n_layer} layers of width {hp.n_embd}, {weights} weights in "
            f"{human_bytes(self.weights.nbytes)}, a context of up to {hp.n_ctx_train}, {hp.n_vocab} tokens; on {names}>"
        )

    @property
    def decoder(self) -> Decoder:
        """What generates text. Raises SessionError when the model is an encoder."""
        if not isinstance(self.network, Decoder):
            raise SessionError(
                f"a session needs a decoder, {self.network.hp.arch} models are encoders and generate no text; use "
                f"Model.embed(), `graphrt embed` on a command line"
            )
        return self.network

    @property
    def encoder(self) -> Encoder:
        """The model as an encoder. Raises SessionError when it is a decoder."""
        if not isinstance(self.network, Encoder):
            raise SessionError(f"this needs an encoder, {self.network.hp.arch} models are decoders; use Model.embed()")
        return self.network

    @checked(SessionError)
    def use_adapters(self, given: Mapping[str, str | os.PathLike[str]], scales: Sequence[float] = ()) -> None:
        """Loads LoRA adapters, files by the names they get; once, before there are sessions. scales: how much of each
        sessions have, 1 of all unless given, and sequences of engines with pages unless told otherwise
        (PagedEngine.use_adapters()). Of a model that is cut over ranks each has a part. Raises GGUFError, SessionError
        for what is no adapter of this model, and for one that has adapters already, RankError where ranks have
        others."""
        if self.decoder.adapters is not None or not given:
            raise SessionError(f"adapters are loaded once, all of them, got {'more' if given else 'none'}")
        home, amounts = for_weights(self.backends), list(scales) or [1.0] * len(given)
        paths = {name: Path(path) for name, path in given.items()}
        if self.decoder.share is not None or isinstance(self.decoder, PlayedDecoder):
            use_adapters(self.decoder, paths, amounts, home, self.ranks)
            return
        files = [read_adapter(path, name, self.decoder.hp.arch, self.weights) for name, path in paths.items()]
        self.decoder.adapters = Adapters(files, amounts, self.weights, home)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Built when text is first needed. Raises TokenizerError for a vocabulary that can't be used."""
        return Tokenizer.from_metadata(self.file.metadata)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The file's chat template, None when it has none."""
        start_soon(self.file.metadata)
        return chat_from_metadata(self.file.metadata, self.tokenizer)

    def use_chat_template(self, source: str) -> None:
        """Has this template, a text in Jinja, stand in the place of the file's own."""
        self.__dict__["chat_template"] = chat_from_metadata({TEMPLATE_KEY: source}, self.tokenizer)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that one token reads: all but experts that it is not given, and an embedding that is only
        a table of rows."""
        network = self.network
        tied = isinstance(network, Decoder) and network.output is network.token_embd
        read = sum(int(t.nbytes * network.share_of_token(t)) for t in self.weights.loaded.values())
        read_only = not tied and network.token_embd.name in self.weights.loaded  # not every stage of a pipeline has it
        return read - (network.token_embd.nbytes if read_only else 0)

    @checked(SessionError)
    def session(self, options: SessionOptions = SessionOptions()) -> Session:
        """A new, empty sequence."""
        return Session(self.decoder, self.backends, options)

    @checked(SessionError)
    def load_session(self, path: str | os.PathLike[str], options: SessionOptions | None = None) -> Session:
        """The session that Session.save() wrote to a file, as it was then; batches have the default size.

        options: with other sizes; the cache's types must be the file's. Without them the file's context counts, unless
        its cache would take more than the weights. Raises SessionError for a file that is no session, damaged, of
        another model or of other cache types, and where its tokens don't fit the context.
        """
        return Session.from_file(path, self.decoder, self.backends, options)

    @checked(SessionError)
    def engine(self, n_seq: int, options: SessionOptions = SessionOptions()) -> Engine | PagedEngine:
        """So many new, empty sequences, which are read together: over pages where options.page names their size."""
        kind = PagedEngine if options.page else Engine
        return kind(self.decoder, self.backends, options, n_seq)

    @checked(SessionError)
    def prompt_tokens(
        self, prompt: str, *, raw: bool = True, system: str | None = None, n_ctx: int = 0, begins: bool = True
    ) -> list[int]:
        """The ids of a prompt: as it stands (raw), or through the chat template, where the file has one, as the command
        `graphrt run` does unless told --raw.

        Text like "<|im_start|>" becomes special tokens either way. n_ctx: the most tokens that are of use, 0 for the
        model's own limit; begins: the text begins a sequence, and has what the model wants there. Raises SessionError
        for a prompt that is empty or longer, as soon as that is known.
        """
        if not prompt:
            raise SessionError("a prompt must not be empty; give some text")
        template = None if raw else self.chat_template
        if template is None:
            return self._ids(prompt, n_ctx, add_bos=None if begins else False, parse_special=True)
        messages = [{"role": "system", "content": system}] if system else []
        return self.chat_tokens(template, [*messages, {"role": "user", "content": prompt}], n_ctx)

    def chat_tokens(self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], n_ctx: int = 0) -> list[int]:
        """The ids of a conversation, [{"role": ..., "content": ...}, ...], up to where the model's answer begins.

        n_ctx: as prompt_tokens() has it. Raises SessionError for a conversation that is longer, ChatTemplateError for
        messages that the template does not take.
        """
        for message in messages:
            if isinstance(message.get("content"), str):
                self._check_length(message["content"], n_ctx)
        return self.rendered_tokens(template.render(messages), n_ctx)

    def rendered_tokens(self, text: str, n_ctx: int = 0) -> list[int]:
        """The ids of what a chat template has written. n_ctx: as prompt_tokens() has it. Raises SessionError for a text
        that is longer."""
        bos = self.tokenizer.bos_id
        starts_with_bos = bos is not None and text.startswith(self.tokenizer.piece(bos).decode("utf-8", "replace"))
        return self._ids(text, n_ctx, add_bos=False if starts_with_bos else None, parse_special=True)

    def _check_length(self, text: str, n_ctx: int, found: int = 0) -> None:
        """Raises SessionError for a text whose characters alone, or whose `found` tokens, are too many for the context:
        a token spells at most as many characters as the longest has."""
        limit, own = n_ctx or self.network.hp.n_ctx_train, self.network.hp.n_ctx_train
        if found > limit or len(text) > limit * self.tokenizer.longest:
            more = f"or raise n_ctx, up to {own}" if limit < own else "the model was trained on no more"
            raise SessionError(
                f"the text is too long: the context holds {limit} tokens, got a text of {len(text)} characters that "
                f"has more; shorten the "
                f"prompt, {more}"
            )

    def _ids(self, text: str, n_ctx: int, **how: Any) -> list[int]:
        """The ids of a text that is to fit the context. how: for Tokenizer.encode()."""
        self._check_length(text, n_ctx)
        ids = self.tokenizer.encode(text, most=n_ctx or self.network.hp.n_ctx_train, **how)
        self._check_length(text, n_ctx, len(ids))
        return ids

    @spells_out
    @checked(SessionError)
    def generate(
        self,
        prompt: str | Sequence[int],
        n: int = 128,
        *,
        sampling: SamplerParams = SamplerParams(),
        raw: bool = True,
        session: Session | None = None,
        stop: str | Iterable[str] = (),
        stop_ids: Iterable[int] = (),
        ignore_eos: bool = False,
        grammar: str | None = None,
        json_schema: str | Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        **samplers: Unpack[SamplerOptions],
    ) -> Iterator[Piece]:
        """Generates at most n tokens after a prompt (a text, or token ids) and yields a piece for each; n = -1: until
        the text ends or the context is full.

        Generation ends after an end-of-generation token or one of stop_ids, which yield a piece without text, and
        before one of the texts `stop`, which is not yielded. ignore_eos: end-of-generation tokens are never chosen.
        grammar: the text follows this GBNF grammar; json_schema: it is JSON that fits this schema; both need the
        package llguidance. logprobs: each piece has its token's log-probability, and those of this many likeliest
        tokens. The other keywords are fields of SamplerParams, and override `sampling`.

        session: a new one by default. It keeps the prompt and all tokens that were yielded, so that another call, if
        only with the prompt [], continues after them. Raises SessionError for a prompt that is empty or longer than the
        context, an n under -1, and invalid values.
        """
        rules = TextRules(n, stop, stop_ids, ignore_eos, grammar, json_schema, logprobs)
        sampler, pieces = self.new_text(sampling.changed(samplers), rules)
        session = session or self.session()
        begins = session.n_past == 0
        tokens = self._prompt(prompt, raw=raw, n_ctx=session.n_ctx, begins=begins)
        return text(session, tokens, n, sampler, pieces, lambda *given: self.next_token(*given))

    @spells_out
    @checked(SessionError)
    def samples(
        self,
        prompt: str | Sequence[int],
        count: int,
        n: int = 128,
        *,
        sampling: SamplerParams = SamplerParams(),
        raw: bool = True,
        options: SessionOptions = SessionOptions(),
        cache: str | os.PathLike[str] | None = None,
        stop: str | Iterable[str] = (),
        stop_ids: Iterable[int] = (),
        ignore_eos: bool = False,
        grammar: str | None = None,
        json_schema: str | Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        **samplers: Unpack[SamplerOptions],
    ) -> Iterator[tuple[int, Piece]]:
        """Generates `count` texts after one prompt, which is read once, and yields (number of the text, its next
        piece), one token of each text in turn. Text i is what generate() gives with the seed + i, up to rounding, since
        the texts are read together.

        options: of the sequences, page and n_pages among them; cache: a file that keeps the prompt, for later prompts
        with the same beginning; the others as in generate(). Raises SessionError as generate() does, for a count that
        is not 1 to MAX_SAMPLES and for a file that this model and these options can't use, and CacheFullError where
        n_pages are too few.
        """
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_SAMPLES:
            raise SessionError(f"the number of samples must be 1 to {MAX_SAMPLES}, got {count!r}")
        rules = TextRules(n, stop, stop_ids, ignore_eos, grammar, json_schema, logprobs)
        first = sampling.changed(samplers)
        texts = [self.new_text(each, rules) for each in first.seeds(count)]
        n_ctx, _ = check_options(options, self.decoder.hp)
        tokens = self._prompt(prompt, raw=raw, n_ctx=n_ctx)
        path = None if cache is None else Path(cache)
        choose = lambda *given: self.next_token(*given)  # noqa: E731
        return samples(self.decoder, self.backends, tokens, n, options, texts, choose, path)

    def _prompt(self, prompt: str | Sequence[int], **how: Any) -> list[int]:
        return self.prompt_tokens(prompt, **how) if isinstance(prompt, str) else list(prompt)

    def new_text(self, sampling: SamplerParams, rules: TextRules) -> tuple[Sampler, Pieces]:
        """What chooses a new text's tokens, and what makes pieces of them; for choices.choices()."""
        matcher = None if rules.is_free else self._grammar_vocab.matcher(rules.grammar, rules.json_schema, rules.regex)
        return rules.sampler(self.tokenizer, self.network.hp.n_vocab, sampling, matcher), rules.pieces(self.tokenizer)

    @cached_property
    def _grammar_vocab(self) -> GrammarVocab:
        return GrammarVocab(self.tokenizer)

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        n: int = ...,
        *,
        session: Session | None = ...,
        stream: Literal[False] = ...,
        **how: Any,
    ) -> str: ...
    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        n: int = ...,
        *,
        session: Session | None = ...,
        stream: Literal[True],
        **how: Any,
    ) -> Iterator[Piece]: ...
    @checked(SessionError)
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        n: int = -1,
        *,
        session: Session | None = None,
        stream: bool = False,
        **how: Any,
    ) -> str | Iterator[Piece]:
        """The assistant's answer to a conversation, through the model's chat template: its text or, with stream, its
        pieces as they are generated.

        messages: [{"role": "system" | "user" | "assistant", "content": text}, ...]; n: the most tokens of the answer,
        -1 until it ends or the context is full; how: the other options of generate(). Nothing is kept between calls,
        unless a session is given: it keeps the conversation and the answer, so that the next call reads only what is
        new. Raises SessionError for no messages, a model without a template, and a conversation that does not fit the
        context, ChatTemplateError for messages that the template refuses.
        """
        if not messages:
            raise SessionError('a conversation must have a message, got none; give [{"role": "user", "content": "Hi"}]')
        template = self.chat_template
        if template is None:
            raise SessionError("chat() needs a model with a chat template, this file has none; use generate()")
        session = session or self.session()
        rest = session.keep_prefix(self.chat_tokens(template, messages, session.n_ctx))
        pieces = self.generate(rest, n, session=session, **how)
        return pieces if stream else "".join(piece.text for piece in pieces)

    def next_token(self, sampler: Sampler, logits: Logits, history: Sequence[int]) -> int:
        """The sampler's choice after `history`; what generate() asks for each token. Of several ranks the first one
        chooses, and tells the others."""
        if self.ranks is None:
            return int(sampler.sample(torch.from_numpy(logits), history))
        first = self.ranks.rank == 0
        return int(self.ranks.told(int(sampler.sample(torch.from_numpy(logits), history)) if first else 0))

    @checked(SessionError)
    def embed(
        self, texts: Sequence[str | Sequence[int]], pooling: str = "", *, normalize: bool = True, n_batch: int = 0
    ) -> list[npt.NDArray[np.float32]]:
        """The embedding of each text, or of token ids: float32 [n_embd], with the pooling "none" [n_tokens, n_embd].

        pooling: "mean", "cls", "last" or "none", "" for the file's own; normalize: to length 1; n_batch: tokens of one
        step, 0 for as many as suit the backend. A decoder's embedding comes from the activations that its logits are
        computed from. Raises SessionError for an unknown pooling, for "" where the file names none, and for a text that
        is empty or too long.
        """
        check_pooling(pooling, self.network.hp.pooling)
        ids = [self._ids(text, 0) if isinstance(text, str) else list(text) for text in texts]
        if isinstance(self.network, Decoder):
            return embed(self.network, self.backends, ids, pooling, normalize=normalize, n_batch=n_batch or HOST_BATCH)
        return Embedder(self.encoder, self.backends, n_batch).embed(ids, pooling, normalize=normalize)

    @checked(SessionError)
    def logits(self, tokens: Sequence[int], options: SessionOptions = SessionOptions()) -> Logits:
        """The logits after every token: float32 [n_tokens, n_vocab], in a sequence of its own."""
        return self.session(options).eval_rows(list(tokens))


@checked(ModelError)
def load(
    path: str | os.PathLike[str] | GGUFFile,
    backend: str | Sequence[str | Backend] | Backend = "auto",
    *,
    exact: bool = False,
    rope: RopeOptions | None = None,
    before: Callable[[GGUFFile, Sequence[Backend]], None] | None = None,
    ranks: Ranks | int = 1,
    stages: int = 1,
    ep: bool = False,
) -> Model:
    """Opens a GGUF file (or takes an open one) and puts its weights where the backend wants them.

    backend: a name, "auto" for the best usable one, an instance, or several, the preferred first; the CPU runs the
    nodes that they refuse. exact: only reference forms of the ops. rope: changes to the rotation of positions. before:
    called before the weights get memory; it may raise. ranks: this process's place among several, each with a part of
    the model (graphrt.ranks.current()), or how many ranks are simulated in this process; stages: of a pipeline, into
    which simulated ranks are divided; ep: each rank has some experts whole, instead of a part of every expert. Raises
    GGUFError, ArchError, BackendError, MemoryPlanError, SessionError for changes that the model can't have, and
    RankError where ranks have different files.
    """
    listed = [backend] if isinstance(backend, (str, Backend)) else list(backend)
    backends = [get_backend(b, exact=exact) if isinstance(b, str) else b for b in listed]
    if all(b.name != "cpu" for b in backends):
        backends.append(get_backend("cpu", exact=exact))
    file = path if isinstance(path, GGUFFile) else GGUFFile.open(path)
    if rope is not None:
        rope.apply(file)
    if before is not None:
        before(file, backends)
    return Model(file, backends, ranks, stages, ep)


@checked(SessionError)
def nll(logits: Logits, targets: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The negative log-likelihood of each target: logits f32 [n, n_vocab], targets n ids; float64 [n]."""
    rows = torch.from_numpy(logits)
    picked = rows[torch.arange(len(targets)), torch.tensor(list(targets))].double()
    return (torch.logsumexp(rows.double(), -1) - picked).numpy()
