"""Facts that the demo model is taught: typed from general knowledge, no source was copied (see DATA.md)."""


def _table(text: str) -> list[list[str]]:
    """Rows of a table written as `field:field; field:field`, with any white space around the parts."""
    return [[" ".join(field.split()) for field in row.split(":")] for row in text.split(";") if row.strip()]


# country : capital : continent ("-" where people count it to two)
COUNTRIES = _table("""
Afghanistan:Kabul:Asia; Albania:Tirana:Europe; Algeria:Algiers:Africa; Andorra:Andorra la Vella:Europe;
Angola:Luanda:Africa; Argentina:Buenos Aires:South America; Armenia:Yerevan:-; Australia:Canberra:-;
Austria:Vienna:Europe; Azerbaijan:Baku:-; the Bahamas:Nassau:North America; Bahrain:Manama:Asia;
Bangladesh:Dhaka:Asia; Barbados:Bridgetown:North America; Belarus:Minsk:Europe; Belgium:Brussels:Europe;
Belize:Belmopan:North America; Bhutan:Thimphu:Asia; Bolivia:Sucre:South America;
Bosnia and Herzegovina:Sarajevo:Europe; Botswana:Gaborone:Africa; Brazil:Brasilia:South America;
Bulgaria:Sofia:Europe; Burkina Faso:Ouagadougou:Africa; Cambodia:Phnom Penh:Asia; Cameroon:Yaounde:Africa;
Canada:Ottawa:North America; Chad:N'Djamena:Africa; Chile:Santiago:South America; China:Beijing:Asia;
Colombia:Bogota:South America; Costa Rica:San Jose:North America; Croatia:Zagreb:Europe;
Cuba:Havana:North America; Cyprus:Nicosia:-; the Czech Republic:Prague:Europe; Denmark:Copenhagen:Europe;
the Dominican Republic:Santo Domingo:North America; Ecuador:Quito:South America; Egypt:Cairo:Africa;
El Salvador:San Salvador:North America; Eritrea:Asmara:Africa; Estonia:Tallinn:Europe;
Ethiopia:Addis Ababa:Africa; Fiji:Suva:-; Finland:Helsinki:Europe; France:Paris:Europe; Gabon:Libreville:Africa;
Georgia:Tbilisi:-; Germany:Berlin:Europe; Ghana:Accra:Africa; Greece:Athens:Europe;
Guatemala:Guatemala City:North America; Guinea:Conakry:Africa; Guyana:Georgetown:South America;
Haiti:Port-au-Prince:North America; Honduras:Tegucigalpa:North America; Hungary:Budapest:Europe;
Iceland:Reykjavik:Europe; India:New Delhi:Asia; Indonesia:Jakarta:-; Iran:Tehran:Asia; Iraq:Baghdad:Asia;
Ireland:Dublin:Europe; Italy:Rome:Europe; Jamaica:Kingston:North America; Japan:Tokyo:Asia; Jordan:Amman:Asia;
Kazakhstan:Astana:-; Kenya:Nairobi:Africa; Kuwait:Kuwait City:Asia; Kyrgyzstan:Bishkek:Asia;
Laos:Vientiane:Asia; Latvia:Riga:Europe; Lebanon:Beirut:Asia; Liberia:Monrovia:Africa; Libya:Tripoli:Africa;
Liechtenstein:Vaduz:Europe; Lithuania:Vilnius:Europe; Madagascar:Antananarivo:Africa; Malawi:Lilongwe:Africa;
Malaysia:Kuala Lumpur:Asia; the Maldives:Male:Asia; Mali:Bamako:Africa; Malta:Valletta:Europe;
Mauritania:Nouakchott:Africa; Mexico:Mexico City:North America; Moldova:Chisinau:Europe;
Mongolia:Ulaanbaatar:Asia; Montenegro:Podgorica:Europe; Morocco:Rabat:Africa; Mozambique:Maputo:Africa;
Namibia:Windhoek:Africa; Nepal:Kathmandu:Asia; the Netherlands:Amsterdam:Europe; New Zealand:Wellington:-;
Nicaragua:Managua:North America; Niger:Niamey:Africa; Nigeria:Abuja:Africa; North Korea:Pyongyang:Asia;
North Macedonia:Skopje:Europe; Norway:Oslo:Europe; Oman:Muscat:Asia; Pakistan:Islamabad:Asia;
Panama:Panama City:North America; Papua New Guinea:Port Moresby:-; Paraguay:Asuncion:South America;
Peru:Lima:South America; the Philippines:Manila:Asia; Poland:Warsaw:Europe; Portugal:Lisbon:Europe;
Qatar:Doha:Asia; Romania:Bucharest:Europe; Russia:Moscow:-; Rwanda:Kigali:Africa; Samoa:Apia:-;
Saudi Arabia:Riyadh:Asia; Senegal:Dakar:Africa; Serbia:Belgrade:Europe; Sierra Leone:Freetown:Africa;
Slovakia:Bratislava:Europe; Slovenia:Ljubljana:Europe; Somalia:Mogadishu:Africa; South Africa:Pretoria:Africa;
South Korea:Seoul:Asia; Spain:Madrid:Europe; Sudan:Khartoum:Africa; Suriname:Paramaribo:South America;
Sweden:Stockholm:Europe; Switzerland:Bern:Europe; Syria:Damascus:Asia; Tajikistan:Dushanbe:Asia;
Tanzania:Dodoma:Africa; Thailand:Bangkok:Asia; Togo:Lome:Africa; Tonga:Nuku'alofa:-; Tunisia:Tunis:Africa;
Turkey:Ankara:-; Turkmenistan:Ashgabat:Asia; Uganda:Kampala:Africa; Ukraine:Kyiv:Europe;
the United Arab Emirates:Abu Dhabi:Asia; the United Kingdom:London:Europe;
the United States:Washington:North America; Uruguay:Montevideo:South America; Uzbekistan:Tashkent:Asia;
Venezuela:Caracas:South America; Vietnam:Hanoi:Asia; Yemen:Sana'a:Asia; Zambia:Lusaka:Africa;
Zimbabwe:Harare:Africa
""")

# In the order of their atomic numbers, name : symbol
ELEMENTS = _table("""
hydrogen:H; helium:He; lithium:Li; beryllium:Be; boron:B; carbon:C; nitrogen:N; oxygen:O; fluorine:F; neon:Ne;
sodium:Na; magnesium:Mg; aluminium:Al; silicon:Si; phosphorus:P; sulfur:S; chlorine:Cl; argon:Ar; potassium:K;
calcium:Ca; scandium:Sc; titanium:Ti; vanadium:V; chromium:Cr; manganese:Mn; iron:Fe; cobalt:Co; nickel:Ni;
copper:Cu; zinc:Zn; gallium:Ga; germanium:Ge; arsenic:As; selenium:Se; bromine:Br; krypton:Kr; rubidium:Rb;
strontium:Sr; yttrium:Y; zirconium:Zr; niobium:Nb; molybdenum:Mo; technetium:Tc; ruthenium:Ru; rhodium:Rh;
palladium:Pd; silver:Ag; cadmium:Cd; indium:In; tin:Sn; antimony:Sb; tellurium:Te; iodine:I; xenon:Xe;
caesium:Cs; barium:Ba; lanthanum:La; cerium:Ce; praseodymium:Pr; neodymium:Nd; promethium:Pm; samarium:Sm;
europium:Eu; gadolinium:Gd; terbium:Tb; dysprosium:Dy; holmium:Ho; erbium:Er; thulium:Tm; ytterbium:Yb;
lutetium:Lu; hafnium:Hf; tantalum:Ta; tungsten:W; rhenium:Re; osmium:Os; iridium:Ir; platinum:Pt; gold:Au;
mercury:Hg; thallium:Tl; lead:Pb; bismuth:Bi; polonium:Po; astatine:At; radon:Rn; francium:Fr; radium:Ra;
actinium:Ac; thorium:Th; protactinium:Pa; uranium:U; neptunium:Np; plutonium:Pu; americium:Am; curium:Cm;
berkelium:Bk; californium:Cf; einsteinium:Es; fermium:Fm; mendelevium:Md; nobelium:No; lawrencium:Lr;
rutherfordium:Rf; dubnium:Db; seaborgium:Sg; bohrium:Bh; hassium:Hs; meitnerium:Mt; darmstadtium:Ds;
roentgenium:Rg; copernicium:Cn; nihonium:Nh; flerovium:Fl; moscovium:Mc; livermorium:Lv; tennessine:Ts;
oganesson:Og
""")

MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
MONTH_DAYS = ["31", "28", "31", "30", "31", "30", "31", "31", "30", "31", "30", "31"]
WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
PLANETS = ["Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"]
ORDINALS = [
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
    "thirteenth",
    "fourteenth",
    "fifteenth",
    "sixteenth",
    "seventeenth",
    "eighteenth",
    "nineteenth",
    "twentieth",
]
NUMBER_WORDS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]
ALPHABET = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")

PLANET_RECORDS = _table("""
the largest planet:Jupiter; the biggest planet:Jupiter; the smallest planet:Mercury;
the planet closest to the Sun:Mercury; the planet nearest to the Sun:Mercury;
the planet farthest from the Sun:Neptune; the most distant planet from the Sun:Neptune; the hottest planet:Venus;
the red planet:Mars; the planet that we live on:Earth; the planet with the brightest rings:Saturn
""")

# things that there are a fixed number of : in what : how many
AMOUNTS = _table("""
days:a week:7; hours:a day:24; minutes:an hour:60; seconds:a minute:60; months:a year:12; weeks:a year:52;
days:a year:365; days:a leap year:366; years:a decade:10; years:a century:100; years:a millennium:1000;
seasons:a year:4; centimeters:a meter:100; millimeters:a centimeter:10; meters:a kilometer:1000;
grams:a kilogram:1000; milliliters:a liter:1000; inches:a foot:12; feet:a yard:3; items:a dozen:12;
planets:the Solar System:8; letters:the alphabet:26; vowels:the alphabet:5; colours:the rainbow:7;
continents:the world:7; oceans:the world:5; bits:a byte:8; cards:a deck:52; squares:a chess board:64;
players:a football team:11; strings:a violin:4; degrees:a circle:360; degrees:a right angle:90; cents:a dollar:100;
chambers:the human heart:4; fingers:one hand:5; wheels:a bicycle:2; wheels:a tricycle:3; wheels:a car:4
""")

SHAPES = _table("""
triangle:3; square:4; rectangle:4; pentagon:5; hexagon:6; heptagon:7; octagon:8; nonagon:9; decagon:10
""")

OPPOSITES = _table("""
hot:cold; big:small; tall:short; fast:slow; up:down; left:right; happy:sad; light:dark; day:night; open:closed;
full:empty; hard:soft; rich:poor; young:old; early:late; wet:dry; clean:dirty; strong:weak; high:low; near:far;
loud:quiet; thick:thin; wide:narrow; true:false; good:bad; in:out; on:off; push:pull; win:lose;
start:finish; begin:end; buy:sell; give:take; love:hate; friend:enemy; inside:outside; above:below; over:under;
before:after; always:never; all:none; many:few; more:less; deep:shallow; sharp:blunt; smooth:rough; sweet:bitter;
brave:cowardly; polite:rude; awake:asleep; alive:dead; north:south; east:west; summer:winter; black:white;
first:last; question:answer; yes:no; arrive:depart; accept:refuse; agree:disagree; add:subtract; ancient:modern;
asleep:awake; attack:defend; backward:forward; beautiful:ugly; borrow:lend; calm:nervous; careful:careless;
cheap:expensive; come:go; complex:simple; cruel:kind; safe:dangerous; easy:difficult; fail:succeed;
float:sink; forget:remember; freeze:melt; fresh:stale; generous:selfish; guilty:innocent; healthy:sick;
hide:show; increase:decrease; junior:senior; lazy:busy; loose:tight; major:minor; maximum:minimum;
noisy:silent; odd:even; optimist:pessimist; public:private; raise:lower; rare:common; rise:fall; same:different;
shout:whisper; sunny:cloudy; upstairs:downstairs; victory:defeat; visible:hidden; war:peace; wise:foolish
""")

THING_COLOURS = _table("""
the sky:blue; grass:green; snow:white; blood:red; the sun:yellow; coal:black; a banana:yellow; an orange:orange;
a lemon:yellow; a strawberry:red; a tomato:red; a carrot:orange; milk:white; chocolate:brown; a cucumber:green;
an elephant:grey; a flamingo:pink; a frog:green; a pumpkin:orange; a cherry:red; cotton:white; lettuce:green;
a raven:black; spinach:green; a polar bear:white; an emerald:green; a ruby:red; a sapphire:blue; lavender:purple;
a fire engine:red; a lime:green; a swan:white; mud:brown; the ocean:blue; an aubergine:purple; broccoli:green
""")

COLOUR_MIXES = _table("""
red:blue:purple; red:yellow:orange; blue:yellow:green; red:white:pink; black:white:grey; red:green:brown
""")

# animal : its young : what it says
ANIMALS = _table("""
dog:puppy:woof; cat:kitten:meow; cow:calf:moo; sheep:lamb:baa; horse:foal:neigh; pig:piglet:oink; duck:duckling:quack;
goat:kid:maa; lion:cub:roar; chicken:chick:cluck; frog:tadpole:ribbit; wolf:pup:howl; owl:owlet:hoot;
goose:gosling:honk; donkey:foal:hee-haw; bear:cub:growl
""")

LEGS = _table("""
dog:4; cat:4; horse:4; cow:4; spider:8; ant:6; bee:6; bird:2; duck:2; human:2; snake:0; fish:0; crab:10; octopus:0;
butterfly:6; elephant:4; frog:4; beetle:6; chicken:2; sheep:4
""")

WORDS = [
    "cat",
    "dog",
    "sun",
    "moon",
    "star",
    "tree",
    "fish",
    "bird",
    "book",
    "door",
    "house",
    "apple",
    "bread",
    "water",
    "river",
    "stone",
    "light",
    "night",
    "green",
    "table",
    "chair",
    "music",
    "paper",
    "pencil",
    "window",
    "garden",
    "flower",
    "summer",
    "winter",
    "banana",
    "orange",
    "lemon",
    "cherry",
    "tomato",
    "potato",
    "carrot",
    "school",
    "teacher",
    "doctor",
    "friend",
    "mother",
    "father",
    "sister",
    "brother",
    "family",
    "kitchen",
    "bottle",
    "camera",
    "letter",
    "number",
    "planet",
    "rocket",
    "castle",
    "bridge",
    "island",
    "forest",
    "desert",
    "mountain",
    "ocean",
    "beach",
    "storm",
    "cloud",
    "rain",
    "snow",
    "wind",
    "fire",
    "earth",
    "horse",
    "tiger",
    "zebra",
    "monkey",
    "rabbit",
    "mouse",
    "spider",
    "dragon",
    "elephant",
    "dolphin",
    "penguin",
    "eagle",
    "robot",
    "computer",
    "keyboard",
    "screen",
    "phone",
    "clock",
    "watch",
    "mirror",
    "candle",
    "basket",
    "blanket",
    "pillow",
    "jacket",
    "button",
    "pocket",
    "hammer",
    "ladder",
    "engine",
    "ticket",
    "train",
    "plane",
    "boat",
    "truck",
    "bicycle",
    "ring",
    "seal",
    "node",
    "layer",
    "prompt",
    "token",
    "model",
    "secret",
]

# what is asked for : the answer in full
LISTS = _table("""
the months of the year:January, February, March, April, May, June, July, August, September, October, November and
 December;
the days of the week:Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday;
the planets of the Solar System:Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune;
the colours of the rainbow:red, orange, yellow, green, blue, indigo and violet;
the primary colours:red, yellow and blue;
the seasons:spring, summer, autumn and winter;
the continents:Africa, Antarctica, Asia, Australia, Europe, North America and South America;
the oceans:the Pacific, the Atlantic, the Indian, the Southern and the Arctic Ocean;
the letters of the alphabet:A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y and Z;
the vowels:A, E, I, O and U;
the noble gases:helium, neon, argon, krypton, xenon, radon and oganesson;
the first ten elements:hydrogen, helium, lithium, beryllium, boron, carbon, nitrogen, oxygen, fluorine and neon;
the cardinal directions:north, east, south and west;
the five senses:sight, hearing, smell, taste and touch;
the numbers from one to ten:1, 2, 3, 4, 5, 6, 7, 8, 9 and 10;
the numbers from one to twenty:1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19 and 20;
the even numbers up to twenty:2, 4, 6, 8, 10, 12, 14, 16, 18 and 20;
the odd numbers up to twenty:1, 3, 5, 7, 9, 11, 13, 15, 17 and 19;
the prime numbers below thirty:2, 3, 5, 7, 11, 13, 17, 19, 23 and 29;
the musical notes:C, D, E, F, G, A and B;
some fruits:apples, bananas, cherries, lemons, oranges, pears and grapes;
some vegetables:carrots, potatoes, onions, peas, beans, cabbage and spinach;
some animals:dogs, cats, horses, cows, lions, elephants, owls and frogs;
some shapes:circle, triangle, square, rectangle, pentagon, hexagon and octagon;
some metals:iron, copper, silver, gold, tin, lead, zinc and nickel;
some musical instruments:piano, violin, guitar, flute, drum, trumpet and harp;
the classical states of matter:solid, liquid and gas
""")

NAMES = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Henry",
    "Ida",
    "Jack",
    "Karen",
    "Leo",
    "Maria",
    "Nina",
    "Oscar",
    "Paula",
    "Quentin",
    "Rosa",
    "Sam",
    "Tina",
    "Uma",
    "Victor",
    "Wendy",
    "Xavier",
    "Yara",
    "Zoe",
    "Ada",
    "Alan",
    "Barbara",
    "Carl",
    "Dennis",
    "Edsger",
    "Frances",
    "Hedy",
    "John",
    "Kathleen",
    "Linus",
    "Margaret",
    "Niklaus",
    "Sophie",
]
