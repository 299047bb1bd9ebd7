"""Reads the options of TRL from a script, a YAML file, command lines or a printed config; none of their code is run."""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fused_rl.trainers.base.text import InputError
from fused_rl.trainers.run.parse import Values, read_file

# The classes of TRL's options, by the word that names them in commands and file names.
CONFIGS = {
    "sft": "SFTConfig",
    "reward": "RewardConfig",
    "dpo": "DPOConfig",
    "cpo": "CPOConfig",
    "orpo": "ORPOConfig",
    "kto": "KTOConfig",
    "gkd": "GKDConfig",
    "distillation": "DistillationConfig",
    "rloo": "RLOOConfig",
    "gspo": "GRPOConfig",
    "grpo": "GRPOConfig",
}
# Options that only one class has, which tell the class of a YAML file.
OF_ONE = {
    "lmbda": "GKDConfig",
    "teacher_model_name_or_path": "DistillationConfig",
    "desirable_weight": "KTOConfig",
    "center_rewards_coefficient": "RewardConfig",
    "simpo_gamma": "CPOConfig",
    "num_generations": "GRPOConfig",
    "reward_funcs": "GRPOConfig",
    "precompute_ref_log_probs": "DPOConfig",
    "packing": "SFTConfig",
    "assistant_only_loss": "SFTConfig",
    "max_seq_length": "SFTConfig",
}
# Arguments of TRL's trainers beside their config, and the options that say the same on a command line.
MODELS = {"model": "model_name_or_path", "teacher_model": "teacher_model_name_or_path"}
ROWS = {
    "train_dataset": ("dataset_name", "dataset_config", "dataset_train_split"),
    "eval_dataset": ("eval_dataset", "eval_dataset_config", "eval_split"),
}
# The names by which load_dataset reads files of one's own.
FORMATS = ("json", "csv", "parquet", "text", "arrow")
# The names of the arguments that a trainer takes by their place, by the class of its options.
PLACES = dict.fromkeys(CONFIGS.values(), ("model", "args", "data_collator"))
PLACES |= dict.fromkeys(("DPOConfig", "KTOConfig"), ("model", "ref_model", "args", "data_collator"))
PLACES |= {"GKDConfig": ("model", "teacher_model", "args", "data_collator")}
PLACES |= dict.fromkeys(("GRPOConfig", "RLOOConfig"), ("model", "reward_funcs", "args"))
PLACES |= {"DistillationConfig": ("model", "teacher_model", "args")}
# Arguments of LoRA and of models whose options have other names on a command line.
ADAPTERS = {"r": "lora_r", "target_modules": "lora_target_modules"}
OF_ADAPTERS = ("use_peft", "lora_r", "lora_alpha", "lora_target_modules", "lora_dropout")
OF_MODELS = {"torch_dtype": "dtype", "revision": "model_revision", "model_name": "model"}
# Arguments that add nothing to the config.
SILENT = (
    "args",
    "processing_class",
    "tokenizer",
    "bias",
    "task_type",
    "use_cache",
    "device_map",
    "num_labels",
)
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.BitOr: operator.or_,
}


class Unread(NamedTuple):
    """A value that is only known when the script runs."""

    source: str
    """The expression of it in the script."""


@dataclass
class Found:
    """The options of one run of TRL."""

    config: str
    """The class of TRL's options, such as GRPOConfig."""
    where: str
    """The file, and for a config in a script its line."""
    options: dict[str, Any] = field(default_factory=dict)
    """The values of TRL's options, which may be `Unread`."""
    processes: int | None = None
    """The number of processes, if a launcher's options say it."""
    is_printed: bool = False
    """True if all options are there, even those that have their defaults."""


def read(path: Path, trainer: str | None) -> list[Found]:
    """Return the runs of TRL that a file describes, one for each config or command line in it.

    Args:
        path: a script (.py), a YAML file, or text with command lines or printed configs.
        trainer: the key in `CONFIGS` of the trainer, which is otherwise told from the file.

    Raises:
        InputError: the file cannot be read, or it has no such config or command line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {error}") from error
    if path.suffix in (".yaml", ".yml"):
        found = [Found("", str(path), read_file(path))]
    elif path.suffix == ".py":
        found = Script(text, path).found()
    else:
        found = list(printed(text, str(path))) or list(commands(text, str(path), path.parent))
    for run in found:
        run.config = CONFIGS[trainer] if trainer else run.config or config_of(run, path)
    if not found:
        raise InputError(f"{path}: {nothing_in(text)}")
    return found


def nothing_in(text: str) -> str:
    """Return why a file has nothing to convert: it points to another file, or its trainer has no counterpart here."""
    # Example scripts of TRL that have moved say so, or only import from the new place.
    moved = re.search(r"\bmoved to\s+(\S+)", text)
    if moved:
        return f"it says that it has moved to {moved[1]}; give that file"
    imports = re.findall(r"^from (\S+) import .*$", text, re.MULTILINE)
    others = [line for line in text.splitlines() if re.match(r"[^\s#\"')]", line)]
    if imports and all(re.match(r"from|import|__all__", line) for line in others):
        return f"it only imports from {', '.join(dict.fromkeys(imports))}; give the file of that"
    # Otherwise name what would be converted, and what is there instead.
    names = dict.fromkeys(CONFIGS.values())
    known = f"found no config that is converted ({', '.join(names)}), nor a command line"
    if re.search(r"\bPPO(Config|Trainer)\b|\btrl ppo\b", text):
        return (
            "PPO is not converted; docs/from_trl.md has its options by name, in the table of options that have "
            "another name, for fused-rl ppo"
        )
    given = re.findall(r"\b(\w+)(?:Config|Trainer)\(", text)
    classes = re.findall(r"^from trl\S* import (.*)$", text, re.MULTILINE)
    strange = [name for name in dict.fromkeys(given) if f"{name}Config" in " ".join(classes)]
    there = (
        f"; {', '.join(f'{name}Config' for name in strange)} has no counterpart" if strange else ""
    )
    return known + there


def config_of(found: Found, path: Path) -> str:
    """Return the class of the options in a file or command line, by options that only one class has or by the name."""
    for option, config in OF_ONE.items():
        if option in found.options:
            return "RLOOConfig" if config == "GRPOConfig" and "rloo" in str(path) else config
    for word, config in CONFIGS.items():
        if word in str(path).lower():
            return config
    raise InputError(f"{path}: which trainer is it for? give --trainer {'|'.join(CONFIGS)}")


def value_of(text: str) -> Any:
    """Return the value of a word in YAML, or the word itself if it is no valid YAML."""
    try:
        return yaml.load(text, Values)
    except (yaml.YAMLError, ValueError):
        return text


def printed(text: str, where: str) -> Iterator[Found]:
    """Yield the configs that were printed, which have a name and its value in each line and no quotes around text."""
    for head, body in re.findall(r"(\w+Config)\(\s*\n(.*?)^\)", text, re.DOTALL | re.MULTILINE):
        options = {}
        for name, value in re.findall(r"^(\w+)=(.*?),?$", body, re.MULTILINE):
            # A member of an enumeration is printed by its class, such as IntervalStrategy.NO.
            value = re.sub(r"^\w+\.([A-Z_]+)$", lambda member: member[1].lower(), value)
            options[name] = None if value == "None" else value_of(value.strip("'\""))
        if head in CONFIGS.values():
            yield Found(head, where, options, is_printed=True)


def commands(text: str, where: str, folder: Path, config: str = "") -> Iterator[Found]:
    """Yield the runs that command lines start, with `trl NAME` or with a script.

    Args:
        text: the text that has the command lines.
        where: what to call the text in messages.
        folder: the folder from which the command lines name other files.
        config: the class of the options, if it is known.
    """
    # A backslash at the end of a line continues it.
    joined = re.sub(r"\\\s*\n", " ", text)
    variables: dict[str, str] = {}
    for line in joined.splitlines():
        line = re.sub(r"\$\{?(\w+)\}?", lambda name: variables.get(name[1], name[0]), line)
        assigned = re.match(r"\s*(?:export\s+)?(\w+)=([\"']?)([^\s\"';$]*)\2\s*(?:$|#|;)", line)
        if assigned is not None:
            variables[assigned[1]] = assigned[3]
        starts = re.search(r"\btrl \w+ --|\.py\b|-m trl\.", line)
        if starts is None or " --" not in line:
            continue
        # A sentence that mentions a script may have an apostrophe, which shlex takes for a quote without an end.
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        # A comment that names a script leaves no words.
        if not words:
            continue
        # A command line has the launcher's options, then the script or TRL's command, then the options to convert.
        at = next((i for i, word in enumerate(words) if is_program(words, i)), 0)
        name = Path(words[at]).name.removesuffix(".py").rpartition(".")[2]
        of_trl = next((CONFIGS[word] for word in CONFIGS if word in name), "")
        found = Found(config or of_trl, where, words_as_options(words[at + 1 :]))
        if not found.options:
            continue
        launched(found, words_as_options(words[:at]), folder)
        # As in TRL, the command line replaces what a file of options says.
        if "config" in found.options:
            file = folder / str(found.options.pop("config"))
            found.options = read_file(file) | found.options
        yield found


def is_program(words: list[str], i: int) -> bool:
    """Return True if a word of a command line is a script or the name of a command of TRL."""
    return words[i].endswith(".py") or words[i].startswith("trl.") or words[i - 1 : i] == ["trl"]


def launched(found: Found, options: dict[str, Any], folder: Path) -> None:
    """Set the number of processes and ZeRO's stage of a run from the options of accelerate or torchrun."""
    for name in ("num_processes", "nproc_per_node", "nproc-per-node", "num_gpus"):
        found.processes = options.get(name, found.processes)
    # A file of accelerate need not be here; TRL's own are named by their stage, such as deepspeed_zero2.yaml.
    file = str(options.get("config_file", ""))
    if file:
        found.options["config_file"] = file
    stage = re.search(r"zero_?([0-3])", file)
    if stage:
        found.options.setdefault("deepspeed", f"zero{stage[1]}")
    paths = [path for path in (Path(file), folder / file) if file and path.is_file()]
    if paths:
        found.processes = found.processes or read_file(paths[0]).get("num_processes")


def words_as_options(words: list[str]) -> dict[str, Any]:
    """Return the options of a command line; one without a value is True, and one with several has a list."""
    options: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, is_joined, value = word.removeprefix("--").partition("=")
            options[name] = [value] if is_joined else []
        elif re.fullmatch("-[a-zA-Z]+", word):
            name = None  # a flag of a launcher, such as -m
        elif name is not None:
            options[name].append(word.rstrip(","))
    for name, values in list(options.items()):
        # A shell's variable that the file does not assign is known only to the shell.
        is_unknown = any(re.search(r"\$[\w{(@*]", value) for value in values)
        read = [Unread(" ".join(values))] if is_unknown else [value_of(value) for value in values]
        options[name] = True if not read else read[0] if len(read) == 1 else read
        # The parser of transformers spells a false flag x as --no_x.
        if not values and name.startswith("no_"):
            options[name.removeprefix("no_")] = not options.pop(name)
    return options


class Script:
    """A Python script, which is parsed and never run; the values of its names are followed to their assignments."""

    def __init__(self, text: str, path: Path):
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            raise InputError(f"{path}: not Python: {error}") from error
        self.text = text
        self.path = path
        self.assigned: dict[str, list[tuple[int, ast.expr]]] = {}
        """The assignments to each name, as pairs of a line and the value."""
        self.set_later: list[tuple[ast.Name, str, ast.expr]] = []
        """Assignments to attributes: the name of the object, the attribute and the value."""
        self.attributes: dict[str, Any] = {}
        """Defaults of dataclass fields and of argparse's options, and the options of a command line, by name."""
        self.functions: dict[str, str] = {}
        """The name module:function of each function that the script defines or imports, and the modules it imports."""
        self.if_asked: set[ast.AST] = set()
        """The nodes that run only if an option requests an upload."""
        self.statement_of: dict[ast.AST, int] = {}
        """The line on which the statement of each node begins; the names in it are assigned above that line."""
        nodes = [*ast.walk(self.tree)]
        self.calls = [node for node in nodes if isinstance(node, ast.Call)]
        self.trainers = [call for call in self.calls if name_of(call.func).endswith("Trainer")]
        # Outer statements come before those in them, so that the innermost one counts.
        for node in nodes:
            if isinstance(node, ast.stmt):
                self.statement_of |= dict.fromkeys(ast.walk(node), node.lineno)
        for node in nodes:
            self._note(node)

    def _note(self, node: ast.AST) -> None:
        """Record what a node assigns, defines, imports or gives a default."""
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._assign(name, node, value)
            # Each name of a tuple is the element at its place.
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=value):
                for i, target in enumerate(names):
                    if isinstance(target, ast.Name):
                        self._assign(target.id, node, ast.Subscript(value, ast.Constant(i)))
            case ast.Assign(targets=[ast.Attribute(value=ast.Name() as owner, attr=name)]):
                self.set_later.append((owner, name, node.value))
            # names["key"] = value and names.update(key=value) are names | {"key": value}.
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name) as owner, slice=key)]):
                added = ast.Dict([key], [node.value])
                self._assign(name, node, ast.BinOp(owner, ast.BitOr(), added))
            case ast.Expr(
                ast.Call(
                    func=ast.Attribute(value=ast.Name(id=name) as owner, attr="update")
                ) as call
            ):
                named = ast.Call(ast.Name("dict", ast.Load()), [], call.keywords)
                added = call.args[0] if call.args else named
                self._assign(name, node, ast.BinOp(owner, ast.BitOr(), added))
            case ast.AugAssign(target=ast.Name(id=name) as owner, op=op, value=value):
                self._assign(name, node, ast.BinOp(owner, op, value))
            case ast.AugAssign(target=ast.Attribute(value=ast.Name() as owner, attr=name)):
                self.set_later.append((owner, name, ast.Constant(Unread(ast.unparse(node)))))
            case ast.Call(
                func=ast.Name(id="setattr"),
                args=[ast.Name() as owner, ast.Constant(value=str(name)), value],
            ):
                self.set_later.append((owner, name, value))
            # This may be a field of a dataclass, whose options a script reads as attributes.
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self._assign(name, node, value)
                self.attributes.setdefault(name, self.value(value))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                self.functions[name] = f"{self.path.stem}:{name}"
            case ast.ImportFrom(module=str(module)):
                for alias in node.names:
                    self.functions[alias.asname or alias.name] = f"{module}:{alias.name}"
            case ast.Import():
                for alias in node.names:
                    self.functions[alias.asname or alias.name] = alias.name
            case ast.If(test=test) if "push_to_hub" in ast.unparse(test):
                self.if_asked.update(ast.walk(node))
            case ast.Call(
                func=ast.Attribute(attr="add_argument"), args=[ast.Constant(value=str(option)), *_]
            ):
                default = keyword(node, "default")
                if default is not None:
                    self.attributes[option.lstrip("-").replace("-", "_")] = self.value(default)

    def _assign(self, name: str, statement: ast.stmt, value: ast.expr) -> None:
        """Record the assignment of a value to a name."""
        self.assigned.setdefault(name, []).append((statement.lineno, value))

    def found(self) -> list[Found]:
        """Return a run for each config that the script makes, or those of its usage if it parses its options."""
        trainer_of = {}
        for trainer in self.trainers:
            trainer_of.setdefault(self.followed(arguments_of(trainer).get("args")), trainer)
        runs = []
        for call in self.calls:
            config = name_of(call.func)
            # Older scripts pass the TrainingArguments of transformers to a trainer of TRL.
            if config == "TrainingArguments" and call in trainer_of:
                config = config_named(trainer_of[call])
            if config in CONFIGS.values():
                run = Found(config, f"{self.path} line {call.lineno}")
                run.options = self.keywords(call, first="output_dir")
                for owner, option, value in self.set_later:
                    if self.followed(owner) is call:
                        run.options[option] = self.value(value)
                self.add_trainer(run, trainer_of.get(call))
                runs.append(run)
        return runs or self.parsed()

    def parsed(self) -> list[Found]:
        """Return the runs of a script that parses its options, from the command lines in its docstring or comments."""
        names = [node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)]
        names += map(config_named, self.trainers)
        config = next((name for name in names if name in CONFIGS.values()), None)
        if config is None:
            return []
        comments = "\n".join(re.findall(r"^# ?(.*)$", self.text, re.MULTILINE))
        usage = ast.get_docstring(self.tree) or comments
        where = str(self.path)
        runs = [*commands(usage, where, self.path.parent, config)] or [Found(config, where)]
        for run in runs:
            self.attributes |= run.options
            # What the script sets after it has parsed its options comes last.
            for owner, option, node in self.set_later:
                call = self.followed(owner)
                value = self.value(node)
                is_default = is_unread(value) and "_args." in value.source
                if isinstance(call, ast.Call) and "parse" in name_of(call.func) and not is_default:
                    run.options[option] = value
            self.add_trainer(run, None, is_parsed=True)
        return runs

    def add_trainer(self, run: Found, trainer: ast.Call | None, *, is_parsed: bool = False) -> None:
        """Add to a run what its trainer gets beside the config: the model, the rows, the rewards and adapters.

        Args:
            run: the run.
            trainer: the call that makes the trainer; None takes the first one of the run's class.
            is_parsed: True if the script parses its options from a command line.
        """
        # A call that uploads the model without a condition is a wish that no option says.
        pushes = [call for call in self.calls if name_of(call.func) == "push_to_hub"]
        if not self.if_asked.issuperset(pushes):
            run.options["push_to_hub()"] = True
        given: dict[str, Any] = {}
        for call in self.calls:
            resumed = keyword(call, "resume_from_checkpoint")
            if resumed is not None and name_of(call.func) == "train":
                given["resume_from_checkpoint"] = self.value(resumed)
        of_class = [call for call in self.trainers if config_named(call) == run.config]
        for call in ([trainer] if trainer else of_class)[:1]:
            for name, node in arguments_of(call).items():
                for option, value in self.argument(name, node).items():
                    given.setdefault(option, value)
        for option, value in given.items():
            # A parsed option that is not on the command line has its default and needs no conversion.
            is_default = is_parsed and is_unread(value) and "_args." in value.source
            if option not in SILENT and not is_default:
                run.options.setdefault(option, value)

    def argument(self, name: str, node: ast.expr) -> dict[str, Any]:
        """Return the options that say the same as an argument of a trainer."""
        if name in MODELS:
            return self.model(name, node)
        if name in ROWS:
            return self.rows(name, node)
        followed = self.followed(node)
        if name == "peft_config":
            # get_peft_config reads options of the command line, which are converted anyway.
            is_made = isinstance(followed, ast.Call) and name_of(followed.func) == "LoraConfig"
            return {"lora_r": 8, "lora_alpha": 8} | self.adapters(followed) if is_made else {}
        if name == "reward_funcs":
            nodes = followed.elts if isinstance(followed, ast.List | ast.Tuple) else [node]
            return {name: [self.reward(each) for each in nodes]}
        value = self.value(node)
        return {} if name == "quantization_config" and is_unread(value) else {name: value}

    def adapters(self, call: ast.Call) -> dict[str, Any]:
        """Return the options of LoRA that are arguments of a call."""
        options = self.keywords(call)
        return {"use_peft": True, "lora_dropout": 0.0} | {
            ADAPTERS.get(name, name): options[name] for name in options
        }

    def model(self, name: str, node: ast.expr) -> dict[str, Any]:
        """Return the options of a model that is named by text, or loaded by a call and perhaps given adapters."""
        call = self.followed(node)
        if not isinstance(call, ast.Call):
            return {MODELS[name]: self.value(node)}
        # get_peft_model(model, …) wraps a model, whose own options are in its first argument.
        if name_of(call.func) == "get_peft_model" and call.args:
            adapters = self.adapters(call)
            kept = {option: adapters[option] for option in OF_ADAPTERS if option in adapters}
            return self.model(name, call.args[0]) | kept
        options = of_model(self.keywords(call, first="model"))
        model = options.pop("model", Unread(ast.unparse(node)))
        read = {option: value for option, value in options.items() if not is_unread(value)}
        return {MODELS[name]: model} | (read if name == "model" else {})

    def reward(self, node: ast.expr) -> Any:
        """Return a reward function as module:function, or the name of a reward model."""
        # A function has no value here, but its name tells where it is defined.
        value = self.value(node)
        if not is_unread(value):
            return value
        owner, _, name = value.source.rpartition(".")
        if owner in self.functions:
            return f"{self.functions[owner].replace(':', '.')}:{name}"
        return self.functions.get(value.source, value)

    def rows(self, name: str, node: ast.expr) -> dict[str, Any]:
        """Return the options of the dataset that `load_dataset` reads, found back through what is done with it later.

        An option "… after" names the methods that change the rows, such as map.
        """
        # From the rows back to load_dataset: through names, a chosen split, a condition, and methods of a dataset.
        changes: dict[str, None] = {}
        split = None
        while not (isinstance(node, ast.Call) and name_of(node.func) == "load_dataset"):
            match node:
                case ast.Name():
                    node = self.before(node)
                case ast.Subscript():
                    split = self.value(node.slice) if split is None else split
                    node = node.value
                case ast.IfExp():
                    node = node.body
                case ast.Call(func=ast.Attribute(value=node, attr=change)):
                    changes[change] = None
                # Rows to which an item is assigned.
                case ast.BinOp(left=node):
                    changes["[…] = …"] = None
                case _:
                    return {}
        options = self.keywords(node, first="path", second="name")
        splits = options.get("split", split)
        split = splits[split] if isinstance(splits, list) and isinstance(split, int) else splits
        # load_dataset("json", data_files=…) reads a file, whose path is the dataset here.
        files = options.get("data_files")
        if isinstance(files, dict):
            part = str(split or "train").partition("[")[0]
            files = files.get(part, Unread(f"{part} of data_files"))
        if files is not None:
            # A list of files, or files of a dataset on the Hub, have no name here.
            path = options.get("path")
            is_one = isinstance(files, str | Unread) and (path in FORMATS or is_unread(path))
            options = {"path": files if is_one else Unread(f"the files {files} of {path}")}
            # A file has no split, and a part of it has to be written.
            if isinstance(split, str) and "[" in split:
                changes[f"split {split}"] = None
            split = None
        made = dict(zip(ROWS[name], (options.get("path"), options.get("name"), split), strict=True))
        made = {option: value for option, value in made.items() if value is not None}
        # A run shuffles its rows itself.
        changes.pop("shuffle", None)
        # The held-out rows are then a part of the training rows, so the split in the file is not theirs.
        if "train_test_split" in changes and name == "eval_dataset":
            made = {}
        return made | ({f"{ROWS[name][0]} after": ", ".join(reversed(changes))} if changes else {})

    def keywords(self, call: ast.Call, first: str = "", second: str = "") -> dict[str, Any]:
        """Return the values of a call's arguments by name; `first` and `second` name the positional ones."""
        positional = zip((first, second), call.args, strict=False)
        values = {name: self.value(node) for name, node in positional if name}
        for each in call.keywords:
            value = self.value(each.value)
            if each.arg is not None:
                values[each.arg] = value
            # **kwargs, if they are a dictionary that can be read.
            elif isinstance(value, dict):
                values |= value
            else:
                values[f"**{ast.unparse(each.value)}"] = value
        return values

    def before(self, name: ast.Name) -> ast.expr:
        """Return the value that was last assigned to a name above the statement in which it is used."""
        line = self.statement_of[name]
        above = [assigned for assigned in self.assigned.get(name.id, []) if assigned[0] < line]
        unread = (0, ast.Constant(Unread(name.id)))
        return max(above, key=lambda assigned: assigned[0], default=unread)[1]

    def followed(self, node: ast.expr | None) -> ast.expr | None:
        """Return the expression that a name stands for, or the node itself if it is no name."""
        match node:
            case ast.Name():
                return self.followed(self.before(node))
            case ast.Subscript(value=ast.Call() as call):
                return call  # one of several values that a call returns
        return node

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression, or `Unread` if it is only known when the script runs."""
        try:
            return self._value(node)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
            return Unread(ast.unparse(node))

    def _value(self, node: ast.expr) -> Any:
        """Return the value of an expression; raise one of the errors that `value` catches if it is not known."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                value = self.value(self.before(node))
                return Unread(name) if is_unread(value) else value
            # torch.bfloat16, for example, is an option's value by its last name.
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                return name
            case ast.Attribute(attr=name):
                return self.attributes[name]
            case ast.List(elts=nodes) | ast.Tuple(elts=nodes):
                return [self._value(each) for each in nodes]
            case ast.Dict(keys=keys, values=nodes):
                values = map(self.value, nodes)
                return dict(zip([self._value(key) for key in keys if key], values, strict=True))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return OPERATORS[type(op)](self._value(left), self._value(right))
            case ast.JoinedStr(values=parts):
                return "".join(str(self._known(part)) for part in parts)
            case ast.FormattedValue(value=part):
                return self._value(part)
            # The default of a field of a dataclass.
            case ast.Call(func=ast.Name(id="field")) if default := keyword(node, "default"):
                return self._value(default)
            case ast.Call(func=ast.Name(id="dict")):
                return self.keywords(node)
            case ast.Call(func=ast.Name(id="str" | "int" | "float"), args=[operand]):
                return self._value(operand)
        raise ValueError(node)

    def _known(self, part: ast.expr) -> Any:
        """Return the value of a part of an f-string, all of which must be known."""
        value = self._value(part)
        if is_unread(value):
            raise ValueError(part)
        return value


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of a keyword argument of a call as a node, or None if it is not given."""
    return next((each.value for each in call.keywords if each.arg == name), None)


def arguments_of(trainer: ast.Call) -> dict[str, ast.expr]:
    """Return the arguments of the call that makes a trainer by their names, also of those given by their place."""
    rows = ("train_dataset", "eval_dataset", "processing_class")
    places = (*PLACES.get(config_named(trainer), ("model", "args")), *rows)
    named = {each.arg: each.value for each in trainer.keywords if each.arg}
    return dict(zip(places, trainer.args, strict=False)) | named


def name_of(function: ast.expr) -> str:
    """Return the last name of a called function, such as b of a.b()."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def config_named(trainer: ast.Call) -> str:
    """Return the class of the options of a trainer, by the name of the trainer."""
    return name_of(trainer.func).replace("Trainer", "Config")


def of_model(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that load a model by the names of the options in TRL."""
    return {OF_MODELS.get(name, name): value for name, value in arguments.items()}


def is_unread(value: Any) -> bool:
    """Return True for a value that is only known when the script runs."""
    return isinstance(value, Unread)
