from .render import (
    ChatPrompter as ChatPrompter,
    chat_prompter as chat_prompter,
    chat_template as chat_template,
    num_unanswered as num_unanswered,
)
from .template import (
    TEMPLATE_FILE as TEMPLATE_FILE,
    TemplateTexts as TemplateTexts,
    has_template as has_template,
    read_template as read_template,
    settled_day as settled_day,
    store_template as store_template,
)
