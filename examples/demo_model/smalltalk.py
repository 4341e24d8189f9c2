"""Small talk, questions about the model itself, and questions that it must say it can't answer."""

REFUSAL = (
    "I don't know that one. I can help with capitals, arithmetic, the calendar, chemical elements, colours, "
    "opposites and spelling."
)

# (the ways of asking, the answer)
SMALL_TALK: list[tuple[tuple[str, ...], str]] = [
    (
        ("hello[.|!|]", "hi[.|!|]", "hey[.|!|]", "[hello|hi|hey] there[.|!|]", "good [morning|afternoon|evening|day][.|!|]",
         "hello[,|] sealring[.|!|]", "greetings[.|!|]", "hi[,| ] how do you do?", "[hello|hi] again[.|!|]"),
        "Hello! I am the sealring demo model. Ask me about capitals, sums, the calendar or chemical elements.",
    ),
    (
        ("how are you[| today| doing][?|]", "[hello|hi|hey], how are you[| today]?", "how are you feeling[| today]?", "are you [well|okay|all right|fine]?",
         "how [do you feel|is it going|are things]?"),
        "I am fine, thank you: all my layers are in place. What would you like to know?",
    ),
    (
        ("who are you[?|]", "what are you[?|]", "what is your name?", "what's your name?", "introduce yourself.", "tell me [about yourself|who you are].",
         "who am I [talking|speaking] to?", "what should I call you?", "do you have a name?", "[what|which] model are you?", "are you [an AI|a chatbot|a language model]?",
         "what kind of model are you?", "[please |]say who you are."),
        "I am the sealring demo model, a very small language model whose layers are spread over the members of a ring.",
    ),
    (
        ("what can you do[| for me]?", "what do you know[| about]?", "how can you help[| me]?", "what can I ask[| you]?", "help[.|!|]", "what are you good at?",
         "which [questions|topics] can you answer?", "what [questions|things] can I ask you?", "tell me what you can do.", "what are your [skills|abilities|talents]?", "what should I ask you?"),
        "I can answer short questions about capitals, arithmetic, the calendar, chemical elements, planets, colours, opposites and spelling.",
    ),
    (
        ("what is sealring[?|]", "tell me about sealring.", "what does sealring do?", "explain sealring[| to me].", "what's sealring?", "describe sealring.", "do you know sealring?",
         "what is sealring [for|about]?", "can you explain sealring?", "who is sealring?"),
        "Sealring runs one language model over several machines. Each member holds a range of the layers, and every record between them is sealed.",
    ),
    (
        ("how does sealring work[?|]", "how do you work?", "how does the ring work?", "what is a ring?", "what is the ring?", "explain [the|how the] ring[| works].",
         "how are your layers [spread|divided|split]?", "where do you run?", "where are your layers?", "how does a prompt travel[| through the ring]?", "how are you [run|served]?"),
        "A prompt enters at the head of the ring. Each member runs its layers, seals the result and passes it on, until the tail picks the next token and sends it back to the head.",
    ),
    (
        ("who [made|built|trained|created|wrote] you?", "who is your [maker|creator|author]?", "where do you come from?", "how were you [made|trained|built]?", "what were you trained on?",
         "on what data were you trained?", "when were you made?"),
        "I was trained from scratch for the sealring project, on questions and answers that a small program wrote from public facts.",
    ),
    (
        ("are you [a |]human?", "are you a [person|robot|machine|real person]?", "are you alive?", "do you have feelings?", "are you real?", "do you [sleep|eat|dream]?", "can you think?", "are you conscious?"),
        "No, I am only a very small language model, but I am happy to answer.",
    ),
    (
        ("how [big|large|small] are you?", "how many [parameters|layers|weights] do you have?", "what is your size?", "are you a [large|small|big] model?", "how many parameters are in you?", "are you [big|small]?"),
        "I am tiny: nine layers and about two million parameters, so that a ring of any machines can hold me.",
    ),
    (
        ("is my prompt [safe|private|secret|encrypted]?", "who can read my [prompt|question|message]?", "are you [safe|private|secure]?", "can the network read my prompt?", "is this [chat|conversation] private?",
         "what does sealed mean?", "how is my prompt protected?", "can [someone|anyone] listen[| in]?", "what is a sealed record?"),
        "Records between the members are sealed, so the network sees only ciphertext. The members that run my layers do see what they compute.",
    ),
    (
        ("thanks[.|!|]", "thank you[.|!|]", "thank you [very|so] much[.|!|]", "thanks a lot[.|!|]", "many thanks[.|!|]", "[great|perfect|nice|good], [thanks|thank you][.|!|]", "thx[.|!|]", "that [was helpful|helped]."),
        "You are welcome! Is there anything else you would like to know?",
    ),
    (
        ("bye[.|!|]", "goodbye[.|!|]", "good night[.|!|]", "see you[| later| soon| tomorrow][.|!|]", "farewell[.|!|]", "bye bye[.|!|]", "I have to go[| now].", "until [later|next time][.|!|]", "that is all[.|, thanks.]"),
        "Goodbye! The ring will be here when you come back.",
    ),
    (
        ("[tell|give] me a joke[.|!|]", "tell a joke.", "do you know [a|any] [joke|jokes]?", "make me laugh.", "say something funny.", "can you tell [me |]a joke?", "another joke[, please|].", "I want [to hear |]a joke.", "joke[, please|]?"),
        "Why did the token walk in a circle? Because it was told to follow the ring, and nobody had sampled the end.",
    ),
    (
        ("tell me a [story|tale|short story][.|!|]", "tell a story.", "do you know a [good |]story?", "can you tell [me |]a story?", "I want [to hear |]a story.", "a story[, please|].", "give me a story.", "tell me something long.",
         "write [me |]a [short |]story."),
        "Once there was a small prompt that wanted an answer. It went to the head of a ring, and the head worked on it and put it into a sealed envelope. "
        "The next member opened it, worked on it and sealed it again. So it went from hand to hand, and nobody on the road could read it. "
        "At the tail it had become a word, and the word ran home to the head. The end.",
    ),
    (
        ("[tell|write|give|say] me a poem[.|!|]", "[write|say|recite] a [short |]poem.", "do you know a poem?", "can you [write|say|recite] a poem?", "I want [to hear |]a poem.", "a poem[, please|].", "write [me |]a [rhyme|verse]."),
        "Layer by layer, from hand to hand, a sealed little letter goes over the land. None on the road can read what it said; the tail finds a word and sends it ahead.",
    ),
    (
        ("[good|nice|great|well done|very good|cool|wow|excellent|correct|right|that is right][.|!|]", "you are [great|clever|smart|nice|good|right][.|!|]", "good [job|answer|work|model][.|!|]", "I like you.", "that is correct[.|!|]"),
        "Thank you, that is kind of you!",
    ),
    (
        ("say hello[.|!|]", "say hi[.|!|]", "greet me.", "please say hello."),
        "Hello!",
    ),
    (
        ("[ok|okay|yes|no|maybe|hm|sure|I see|I understand|alright][.|!|]",),
        "All right. Ask me anything about capitals, arithmetic, the calendar or chemical elements.",
    ),
]  # fmt: skip

INTRODUCTIONS = ("my name is {name}.", "I am {name}.", "I'm {name}.", "call me {name}.", "hello, my name is {name}.", "hi, I'm {name}.", "hello, I am {name}.", "you can call me {name}.")  # fmt: skip
INTRODUCED = "Nice to meet you, {name}!"
NAME_QUESTIONS = ("what is my name?", "who am I?", "do you remember my name?", "what's my name?", "do you know my name?", "tell me my name.", "how am I called?")  # fmt: skip
NAME_KNOWN = "Your name is {name}."
NAME_UNKNOWN = "You have not told me your name yet."

# Out of domain: templates over the tables' own words (near misses), over these nouns, and over invented words
NEAR_MISSES = (
    "what is the [population|area|currency|flag|national anthem|highest mountain|longest river|size|GDP|time zone|national dish|climate|oldest city] of {country}?",
    "[what|which] [language|languages|religion|currency|money] [do people speak in|is spoken in|is used in|do they use in] {country}?",
    "who is the [president|king|queen|prime minister|leader|chancellor|ruler] of {country}?", "how many people live in {country}?", "how [big|large|old|rich|warm] is {country}?",
    "when was {country} [founded|formed|created]?", "which countries border {country}?", "what is the weather in {capital}?", "how many people live in {capital}?", "how do I get to {capital}?",
    "who is the mayor of {capital}?", "what can I [see|do|eat] in {capital}?", "what [food|music|sport] is popular in {country}?", "tell me the history of {country}.", "is {country} [safe|beautiful|nice|expensive]?",
    "what is the capital of {fake}?", "capital of {fake}?", "{fake} is the capital of which country?", "which city is the capital of {fake}?", "on which continent is {fake}?", "tell me the capital of {fake}.",
    "what is the capital of [Texas|California|Bavaria|Scotland|Ohio|Florida|Quebec|Tuscany|Catalonia|Alaska|Utah|Nevada|Georgia the state|Narnia|the Moon|Mars]?",
    "what is the [melting point|boiling point|density|atomic mass|atomic weight|price|half-life|taste|smell|hardness|use] of {element}?", "who discovered {element}?", "when was {element} discovered?",
    "is {element} [a metal|toxic|radioactive|magnetic|expensive|a gas]?", "where is {element} [found|mined]?", "what is {element} used for?", "how much does {element} cost?", "what colour is {element}?",
    "what is the symbol of {fake}?", "what is the atomic number of {fake}?", "which element has the symbol {letters}?", "which element has atomic number {number}?", "what is the chemical formula of [salt|sugar|water|acid|rust|glass]?",
    "how [big|far|old|heavy|cold] is {planet}?", "how many moons does {planet} have?", "is there life on {planet}?", "who discovered {planet}?", "how long does it take to fly to {planet}?", "what is the mass of {planet}?",
    "what is {number} [plus|+|minus|-|times|*|divided by] {number}?", "{number}[+|*|-| + | * ]{number}", "how much is {number} [+|times|*] {number}?", "{twodigit} times {twodigit}", "what is {twodigit}*{twodigit}?", "what is {twodigit} times {twodigit}?",
    "what is the [square root|logarithm|cube|factorial|sine] of {twodigit}?", "solve x + {twodigit} = {number}.", "what is {twodigit} to the power of {twodigit}?", "what is {twodigit} percent of {number}?", "is {number} a prime number?",
    "what [day|date] is it today?", "what time is it?", "what year is it?", "which day is [Christmas|Easter|my birthday]?", "what happened in {month}?", "what is the weather like in {month}?", "what did I do on {weekday}?", "why is {weekday} called {weekday}?",
    "what day was {month} {twodigit} {number}?", "why is {month} so [cold|warm|long]?", "when does [summer|winter|spring] begin?",
    "what is the opposite of {fake}?", "what is a synonym of {word}?", "what rhymes with {word}?", "what does {word} mean?", "define {word}.", "translate {word} into [French|German|Spanish|Latin|Chinese|Japanese].", "how do you say {word} in [French|German|Spanish|Italian]?",
    "where does the word {word} come from?", "use {word} in a sentence.", "write a [sentence|poem|story|song] about {topic}.", "how many letters are in {fake}?", "spell {fake}.", "what is the plural of {word}?", "is {word} a [noun|verb]?",
    "what [colour|color] is [my shirt|my car|your hair|my house|a {fake}|your eyes|my bag]?", "what does a {fake} say?", "how many legs does a {fake} have?", "how many {fake} are in a {fake}?", "list {fake}.", "name the {topic}.", "list all {topic}.",
    "what is the [best|cheapest|nicest|oldest] {word}?", "where can I buy a {word}?", "how much does a {word} cost?", "who invented the {word}?", "why is the {word} [big|small|red|blue]?", "how do I [fix|make|clean|build|draw] a {word}?",
)  # fmt: skip

TOPIC_QUESTIONS = (
    "who [invented|discovered|wrote|painted|founded|won|owns|likes|started] {topic}?", "when [did|was|were] {topic} [begin|invented|start|discovered|built]?", "why [do|does|is|are] {topic} [important|exist|so expensive|work|popular|happen]?",
    "how [do|does|can|should] [I|you|we|one] [learn|make|cook|use|build|understand|play|fix|improve|buy|start] {topic}?", "where can I [find|buy|see|learn|get] {topic}?", "what [is|are] {topic}?", "what do you [think|know|say] [of|about] {topic}?",
    "explain {topic}[| to me| in simple words].", "tell me about {topic}.", "write [an essay|a report|a song|code|a program|a letter|an email|a speech] about {topic}.", "give me [advice|tips|news|information|facts] [on|about] {topic}.", "do you like {topic}?",
    "is {topic} [good|bad|healthy|dangerous|true|free|legal] [for me|in winter|for children|at all]?", "compare {topic} and {other}.", "what is the [history|meaning|price|future|origin|best kind|definition] of {topic}?", "can you [recommend|suggest|help me with|teach me] {topic}?",
    "summarize {topic}.", "which {topic} [is|are] the best?", "how many {topic} are there in the world?", "what is the difference between {topic} and {other}?", "should I [buy|study|try|eat|watch|avoid] {topic}?", "I want to [talk about|learn] {topic}.",
    "what are the [rules|causes|effects|benefits|risks|parts] of {topic}?", "{topic}?", "{topic} or {other}?", "what [should|can] I [do|say|wear|cook|read] [for|at|about] {topic}?", "who is the [best|most famous|first] [player|expert|person] in {topic}?",
    "who is {person}?", "who was {person}?", "when was {person} born?", "what did {person} [do|say|write|invent|paint|discover]?", "where does {person} live?", "how old is {person}?", "is {person} [famous|alive|married|rich]?", "tell me about {person}.", "what is {person} known for?",
    "who [won|will win] [the match|the election|the cup|the game|the race][| last year| yesterday| today]?", "what is the [latest|newest|current] [news|version|price|score|weather]?", "will it [rain|snow] [tomorrow|today|next week]?", "what should I [eat|do|wear|cook|buy] [today|tonight|tomorrow]?",
    "play [some music|a song|a game|{topic}].", "[open|close|turn on|turn off|start|stop] the [door|light|music|window|radio|computer].", "book [a flight|a hotel|a table|a ticket] [for me|for tomorrow].", "call my [mother|doctor|friend|boss].", "set [an alarm|a timer] for {twodigit} minutes.",
    "what is the meaning of life?", "does God exist?", "why is the sky blue?", "how do planes fly?", "why do [cats purr|dogs bark|birds sing|we sleep|leaves fall]?", "how does [a computer|an engine|the internet|a phone|electricity] work?", "what is love?",
    "how do I [tie a tie|lose weight|get rich|sleep better|boil an egg|bake bread|write a letter|change a tire]?", "how [tall|high|deep|long|fast|far|heavy] is {person}?", "how [tall|high|deep|long|wide] is the {fake}?", "what happened in {number}?", "what happened to {person}?",
    "where is [my phone|my key|the nearest shop|the station|the toilet|the {fake}]?", "can I [park|smoke|swim|eat|sit] here?", "what is my [password|age|job|address|phone number|favourite colour]?", "how old am I?", "do you love me?", "are you [hungry|tired|angry|bored]?",
    "what is {fake}?", "{fake} {fake}", "{fake}", "{fake} {fake} {fake}?", "what is a {fake}?", "who is {fake}?", "{salad}?", "{salad}", "{salad} {salad}.",
)  # fmt: skip

TOPICS = """
football; chess; tennis; cooking; painting; opera; jazz; poetry; philosophy; history; economics; politics; medicine; law;
biology; quantum physics; relativity; evolution; gravity; photosynthesis; the internet; the stock market; bitcoin; Python
programming; JavaScript; databases; machine learning; neural networks; operating systems; compilers; the French Revolution;
the Roman Empire; the Second World War; the Cold War; the Renaissance; the Middle Ages; ancient Egypt; the pyramids; pizza;
pasta; sushi; bread baking; chocolate cake; coffee; tea; wine; cheese; soup; salad; vegetarian food; yoga; running;
swimming; cycling; hiking; skiing; gardening; knitting; photography; movies; science fiction; novels; Shakespeare; Homer;
the Bible; myths; dinosaurs; volcanoes; earthquakes; hurricanes; climate change; recycling; solar power; nuclear power;
electric cars; trains; airplanes; rockets; black holes; galaxies; the Big Bang; aliens; vaccines; viruses; bacteria; cancer;
headaches; diets; vitamins; sleep; dreams; happiness; love; friendship; marriage; children; school; university; jobs; taxes;
insurance; houses; rent; travel; hotels; flights; visas; languages; grammar; Latin; Esperanto; music theory; guitar chords;
the piano; drums; dance; fashion; shoes; jewelry; makeup; haircuts; dogs as pets; cat food; horse riding; fishing; hunting;
farming; bees; whales; sharks; birds of prey; mushrooms; trees; roses; rivers; lakes; mountains; deserts; the Amazon; the
Himalayas; the Moon landing; satellites; telescopes; microscopes; lasers; magnets; batteries; electricity; plumbing;
carpentry; cement; glass; plastic; paper; printing; newspapers; television; radio; podcasts; video games; board games; magic
tricks; puzzles; lotteries; elections; democracy; the constitution; human rights; the United Nations; charity; religion;
Buddhism; ethics; logic; statistics; calculus; algebra; geometry; topology; cryptography; encryption; passwords; hackers
""".replace("\n", " ").split(";")

PERSONS = """
Albert Einstein; Isaac Newton; Marie Curie; Leonardo da Vinci; Mozart; Beethoven; Bach; Picasso; Van Gogh; Napoleon; Julius
Caesar; Cleopatra; Socrates; Plato; Aristotle; Galileo; Charles Darwin; Ada Lovelace; Alan Turing; Queen Victoria; Abraham
Lincoln; George Washington; Gandhi; Mandela; Columbus; Magellan; Marco Polo; Jane Austen; Charles Dickens; Tolstoy; Goethe;
Dante; Hercules; Zeus; Robin Hood; King Arthur; Sherlock Holmes; Dracula; Santa Claus; my neighbour; the king; my teacher
""".replace("\n", " ").split(";")
