"""The words of chat templates that templates.py joins."""


def _split(words: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in words.split(";"))


NUMBERS = _split(
    """
    0; 1; 2; -1; 7; 1.5; 60; 255; 9999; 10000; 10001; 99999; 10**9; 2**61 - 1; 1e308
    """
)
TEXTS = _split(
    r"""
    'a'; ''; 'content'; 'role'; ' '; '%s'; '%d'; '{}'; '{0:9}'; '\n'; '\r'; 'é😀'; '__class__'; '1'; 'a.b.c'; 'k,v';
    '<&>'; '\ud800'; '%(a)s'; '\x1b[2J'; ','; '%Y-%m'
    """
)
#: Filters of any kind of value. EXPR stands for any expression, TEXT, LIST, DICT and N for one of that kind.
FILTERS = _split(
    """
    abs; batch; capitalize; count; d; default; dictsort; e; escape; first; float; groupby; indent; int; items; join;
    last; length; list; lower; map; max; min; reject; rejectattr; replace; reverse; round; safe; select; selectattr;
    slice; sort; string; title; trim; unique; upper; wordcount; tojson; list; join; map; replace; string;
    replace(EXPR, EXPR); replace(old=EXPR, new=EXPR); join(EXPR); join(d=EXPR); indent(N); indent(EXPR, true);
    indent(width=N, first=true, blank=true); batch(N, EXPR); slice(N); default(EXPR, true); round(N, 'ceil');
    map(attribute=EXPR); map(attribute='content'); map(attribute='a.b.c', default=EXPR); sort(attribute=EXPR);
    groupby(EXPR); groupby('role'); unique(true); sort(true); tojson(indent=N); tojson(separators=(EXPR, EXPR));
    int(EXPR, N); trim(EXPR); dictsort(true, 'value'); join(',', attribute=EXPR); max(attribute=EXPR)
    """
)
UNKNOWN = _split(
    """
    attr; format; center; sum; random; pprint; urlize; xmlattr; wordwrap; truncate; nothing
    """
)
METHODS = _split(
    """
    strip; lstrip; rstrip; split; rsplit; splitlines; partition; rpartition; join; replace; find; startswith;
        endswith;
    removeprefix; removesuffix; rfind; index; rindex; count; lower; upper; title; capitalize; casefold; swapcase;
        zfill;
    ljust; rjust; center; isdigit; format; items; keys; values; get; copy; format_map; encode; append; update;
    translate; __len__; expandtabs
    """
)
BINARY = _split(
    """
    +; -; *; /; //; **; %; ~; ~; +; *; and; or; %
    """
)
TESTS = _split(
    """
    defined; undefined; string; number; mapping; sequence; iterable; none; in; eq; ne; lt; gt; sameas; even; odd;
    divisibleby; callable; boolean; true; false; lower; upper; escaped; filter
    """
)
#: What yields a text, a list, a number or a mapping from values of known kinds.
TYPED = {
    "s": _split(
        """
        TEXT ~ TEXT; TEXT + TEXT; TEXT * N; TEXT[N:]; TEXT[::-1]; TEXT | replace(TEXT, TEXT); TEXT | upper;
        TEXT | replace(old=TEXT, new=TEXT); TEXT | replace(TEXT, TEXT, N); TEXT | indent(N); LIST | join(TEXT);
        TEXT | indent(TEXT, true); TEXT | indent(width=N, blank=true); LIST | join(d=TEXT); DICT | join(TEXT);
        LIST | tojson; DICT | tojson(indent=2); LIST | tojson(indent=N); LIST | tojson(separators=(TEXT, TEXT));
        TEXT | e;
        TEXT | safe; TEXT | title; TEXT | trim(TEXT); LIST | string; DICT | string; N | string;
        TEXT.replace(TEXT, TEXT);
        TEXT.join(LIST | map('string')); TEXT.strip(TEXT); TEXT.center(N); TEXT.zfill(N); TEXT.format(TEXT, N, LIST);
        '{0}{1}{0}'.format(LIST, TEXT); '%s%r' % (TEXT, LIST); '%99s' % TEXT; TEXT.ljust(N, 'é');
        TEXT.removeprefix(TEXT);
        TEXT.casefold(); f(TEXT, LIST, DICT); f(x=TEXT, k=LIST, j=DICT); TEXT % LIST; TEXT % DICT;
        messages[0].content;
        TEXT | default(TEXT); (TEXT, LIST) | string; caller | string
        """
    ),
    "l": _split(
        """
        LIST + LIST; [LIST, LIST]; [TEXT, N]; LIST * N; LIST[N:]; LIST | list; TEXT | list; range(N) | list;
        LIST | map('string') | list; LIST | map('list') | list; LIST | sort; LIST | unique | list; TEXT.split(TEXT);
        LIST | select('in', LIST) | list; LIST | reject('eq', EXPR) | list; LIST | reverse | list;
        DICT | items | list;
        LIST | batch(N, TEXT) | list; LIST | slice(N, LIST) | list; DICT.values() | list; DICT | dictsort;
        TEXT.split();
        LIST | map('replace', TEXT, TEXT) | list; LIST | map('default', LIST) | list; TEXT.rsplit(TEXT, N);
        (LIST, LIST);
        TEXT.splitlines(); TEXT.rpartition(TEXT); messages | selectattr('role', 'in', TEXT) | list; [DICT, DICT];
        LIST | map('string') | sort(reverse=true) | list; messages | groupby('role');
        messages | map(attribute='n') | list;
        messages | map(attribute='a.b', default=LIST) | list; DICT.items() | list; DICT.values(); DICT.keys();
        [f, dict];
        LIST | map('map', 'string') | map('list') | list; LIST | select('sameas', LIST) | list;
        [TEXT.join, LIST.index]
        """
    ),
    "n": _split(
        """
        N + N; N * N; N ** N; N - N; N // N; N / N; N % N; LIST | length; TEXT | length; TEXT | wordcount; TEXT | int;
        N | round(N); N | abs; TEXT.count(TEXT); TEXT.rfind(TEXT); LIST.count(EXPR); LIST.index(EXPR);
        (LIST == LIST) | int;
        (EXPR in LIST) | int; (TEXT in TEXT) | int; (LIST < LIST) | int; (N | string) | int;
        LIST | map('length') | max;
        (DICT == DICT) | int; TEXT.find(TEXT); -N; [TEXT, LIST] | length; N | float
        """
    ),
    "d": _split(
        """
        {TEXT: LIST, N: DICT}; dict(k=LIST, j=TEXT); dict(DICT, k=DICT); {(N, TEXT): LIST}; dict(DICT.items());
        DICT.copy();
        dict(LIST | batch(2)); {'k': DICT.values()}; messages[1]; {LIST | join: DICT}; dict(LIST | map('list'))
        """
    ),
}
LEAVES = {
    "s": ("a", "ns.a", "bos_token", "m.content"),
    "l": ("b", "ns.b", "messages", "m.tools"),
    "n": ("i", "n"),
    "d": ("c", "m"),
}
