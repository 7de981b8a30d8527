"""What the report calls the reasons to drop a record, and the changes to one that is kept."""


class Drop(Exception):
    """A record cannot be used; the argument is the reason, as the report counts it.

    What differs from record to record, such as a role, follows a colon: the report counts
    reasons by themselves up to a number, and those beyond it by their part before the colon.
    """


# Reasons to drop a record.
NOT_A_RECORD = "not a record"
NO_SHAPE = "no known shape of a conversation: it has "
NOT_TURNS = "turns that are not a list: "
SPLIT_TABLE = (
    'a table of `columns` and `data` (to_json(orient="records", lines=True) of pandas would work)'
)
LOST_COMMAS = (
    "turns that lost the commas between them, as in a CSV of pandas (JSON lines or Parquet would "
    "work)"
)
QUESTIONS = "questions without answers: `turns` next to `question_id`, as in MT-Bench"
NOT_TEXT = "a question or answer that is not text: "
OPTIONS = "several answers, and a field that may say which of them is right: "
MISSING = "a field that the source's `fields` name is missing: "
WITH_MEDIA = "more than text, of which nothing is read: "
EMPTY_RECORD = "empty record"
BROKEN_ID = "an `id` with broken characters"
BAD_TURN = "a turn without role or text"
CONTENT_NOT_TEXT = "a turn whose content is not text: "
BAD_PART = "a content part that is not text: "
EMPTY_PART = "a content part without a text: it has "
PARTLY_IN_LOSS = (
    "a flag takes only a part of an answer out of the loss: `{}` (a flag of the whole turn, or "
    "turns of their own, would work)"
)
BAD_HISTORY = "`history` is not a list of pairs"
UNDESIRABLE = "an answer that its `label` calls bad (the format preference, with kto, is for these)"
BAD_LOSS_MASK = "`loss_mask` does not match the turns"
TREE_MESSAGE = "one message of a tree, without a usable id"
MESSAGE_TWICE = "one message of a tree, with the id of another"
NO_PARENT = "one message of a tree, replying to a message that is missing"
UNKNOWN_ROLE = "unknown role: "
NOT_A_CALL = "a `function_call` or `tool_call` turn whose text is no call in JSON"
CALL_OF_ANOTHER = "a tool call in a turn that is not the assistant's"
THOUGHT_ALONE = "reasoning without an answer after it"
BAD_HTML = "HTML that cannot be read"
EMPTY_TURN = "empty turn"
LATE_SYSTEM = "system turn in the middle"
NO_HUMAN = "no human turn"
NO_ANSWER = "no answer"
NOT_ALTERNATING = "roles do not alternate"
RATE_LIMITED = "the only answer is a service's error message"
DUPLICATE = "duplicate"
REFUSAL = "refusal"
COMPANY_NAME = "company name"
OTHER_LANGUAGE = "other language"

# Changes to a record that is kept.
LEADING_ASSISTANT = "leading assistant turns dropped"
OPENING_ANSWER = "an answer before the first question kept as context, not in the loss"
TRAILING_HUMAN = "unanswered last turn dropped"
LONE_SURROGATE = "broken characters replaced"
NO_CONTENT = "a `content` that is null, or missing, next to calls or reasoning: taken as empty"
JOINED_PARTS = "parts of a content joined to one text"
JOINED_RESULT = "parts of a tool's result joined to one text"
DEVELOPER = "a developer's turn read as a system turn"
EMPTY_SYSTEM = "empty system turn left out"
MADE_IDS = "ids made for calls that had none, which some templates write"
WHITE_SPACE = "white space at the ends of a turn removed"
OUT_OF_LOSS = "turns left out of the loss by "
OTHERS_FLAG = (
    "a flag puts a turn that is not the assistant's into the loss: only data.train_on: everything "
    "does"
)
THOUGHT_FLAG = "a flag takes reasoning out of the loss, but not its answer: ignored"
FRACTION = "`{}` between 0 and 1, or above: counted as 1"
TABLE_NULLS = (
    "nulls of a table's unused keys left out of tools, calls, results or `chat_template_kwargs`"
)
NESTED_TOOLS = "descriptions of tools put into OpenAI's form, under `function`"
ARGUMENTS = "arguments of a call that were JSON text, written anew"
JOINED_CALLS = "calls in turns one after another joined to one turn"
RESULT_AS_TEXT = "a tool's result that was a JSON value, written as JSON text"
TOOLS_LEFT_OUT = "descriptions in `tools` left out"
OTHER_REPLIES = "replies of a tree other than the best ranked left out"
TURNS_IN_TEXT = "a prompt or completion that is the text of a list of turns: read as these turns"
CONTEXT_FIRST = "`{}` put before its question"
OTHER_ANSWERS = "reference answers other than the first left out"
DIALOGUE_IN_TEXT = "a prompt of `Human:` and `Assistant:` read as turns"
FROM_HTML = "HTML turned into markdown"
CUT_AT_RATE_LIMIT = "cut before a service's error message"
SPLIT = "longer than context_length, split on whole exchanges"
