"""A chat template for models without one, which are trained on texts and not on chats: a transcript to go on with."""

from __future__ import annotations

#: Jinja. An answer begins with a space of its own, as the model writes it.
SOURCE = (
    "{% for m in messages %}{% if m.role == 'user' %}User: {% elif m.role == 'assistant' %}Assistant:{% endif %}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
#: Where an answer ends: such models also write the next question.
STOP = "\nUser:"
