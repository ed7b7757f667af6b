"""The words of `grammar`, as tables.

Classes say which words go together: a verb takes a noun, an adjective describes one, if they share a class. A noun's
classes are those of its heading, its own, its English name, and "any" if one can count it.

A noun: English[/irregular plural], article, German, plural, classes. "der*" declines weakly (den Jungen). The plural
is "-" for a mass noun, "." for a noun used in the singular only. A heading of places ends with the English and German
prepositions for being there and for going there.
"""

NOUNS = {
    "person": """
        man/men der Mann Männer, woman/women die Frau Frauen, boy der* Junge Jungen, girl das Mädchen Mädchen,
        child/children das Kind Kinder, mother die Mutter ., father der Vater ., sister die Schwester Schwestern,
        brother der Bruder Brüder, teacher der Lehrer Lehrer, neighbour der* Nachbar Nachbarn, farmer der* Bauer Bauern,
        student der* Student Studenten, guest der Gast Gäste, friend der Freund Freunde""",
    "person place at_{}'s bei to_{} zu": "doctor der Arzt Ärzte, aunt die Tante Tanten",
    "animal": """
        dog der Hund Hunde, cat die Katze Katzen, horse das Pferd Pferde, bird der Vogel Vögel flyer,
        elephant der* Elefant Elefanten""",
    "thing flat": """
        book das Buch Bücher text, newspaper die Zeitung Zeitungen text, contract der Vertrag Verträge text document,
        bill die Rechnung Rechnungen document, key der Schlüssel Schlüssel, knife/knives das Messer Messer,
        picture das Bild Bilder, coat der Mantel Mäntel garment, shirt das Hemd Hemden garment""",
    "thing upright": """
        bottle die Flasche Flaschen container, cup die Tasse Tassen, lamp die Lampe Lampen device switch,
        chair der Stuhl Stühle wooden, candle die Kerze Kerzen fuel, flower die Blume Blumen plant,
        suitcase der Koffer Koffer container opening""",
    "thing device": """
        car das Auto Autos, boat das Boot Boote wooden, clock die Uhr Uhren, radio das Radio Radios switch,
        bicycle das Fahrrad Fahrräder, machine die Maschine Maschinen machine""",
    "thing food": "apple der Apfel Äpfel, egg das Ei Eier, cake der Kuchen Kuchen",
    "food": "bread das Brot -",
    "drink": "water das Wasser -, coffee der Kaffee -",
    "opening": "door die Tür Türen, window das Fenster Fenster",
    "vehicle": "bus der Bus Busse, train der Zug Züge",
    "plant": "tree der Baum Bäume",
    "sport": "baseball der Baseball -, tennis das Tennis -, football der Fußball -",
    "season": "winter der Winter .",
    "body skin": "hand die Hand Hände",
    "": "money das Geld -, tobacco der Tabak -, fish der Fisch ., word das Wort Wörter",
    "story": "story die Geschichte Geschichten text",
    "place in_{} in into_{} in": """
        garden der Garten Gärten, kitchen die Küche Küchen room, bathroom das Badezimmer Badezimmer room,
        house das Haus Häuser building landmark, cave die Höhle Höhlen sight, city die Stadt Städte far,
        cellar der Keller Keller room, workshop die Werkstatt Werkstätten room""",
    "place in_{} in to_{} zu": "zoo der Zoo Zoos sight far, castle das Schloss Schlösser sight far building landmark",
    "place at_{} in to_{} zu": """
        school die Schule Schulen far landmark, museum das Museum Museen sight far institution,
        stadium das Stadion Stadien sight far""",
    "place at_{} an to_{} zu": """
        station der Bahnhof Bahnhöfe stop far landmark, beach der Strand Strände stop far, lake der See Seen far""",
    "place at_{} auf to_{} zu": "market der Markt Märkte stop far",
    "place on_{} auf onto_{} auf": """
        table der Tisch Tische surface wooden, bed das Bett Betten surface, roof das Dach Dächer high,
        mountain der Berg Berge high, bridge die Brücke Brücken building""",
    "in_{} in into_{} in": "river der Fluss Flüsse",
}

# The senses of a word: German noun, classes | where only this sense is seen | what someone does who means this one.
SENSES = {
    "bank": """
        die Bank Banken institution | city market | need money, pay bill, find money
        das Ufer Ufer shore | lake | swim river, catch fish, repair boat""",
    "bat": """
        die Fledermaus Fledermäuse animal flyer | cave cellar | visit cave, feed bird, visit zoo
        der Schläger Schläger flat wooden stick | stadium | play baseball, play tennis, visit stadium""",
    "spring": """
        der Frühling . season | | hate winter, plant flower, plant tree
        die Feder Federn flat metal part | workshop | repair clock, repair machine, repair bicycle
        die Quelle Quellen source | mountain | drink water, need water""",
    "seal": """
        die Robbe Robben animal | zoo beach | visit zoo, catch fish, go beach
        das Siegel Siegel document | | sign contract, check bill, read contract""",
    "crane": """
        der Kran Kräne machine metal device | station bridge | build house, build bridge, build castle
        der Kranich Kraniche animal flyer | lake zoo | feed bird, watch bird, go lake""",
    "nail": """
        der Nagel Nägel flat metal | roof workshop | hang_up picture, build house, repair chair
        der Fingernagel Fingernägel fingernail | | wash hand, scratch hand, show hand""",
    "letter": """
        der Brief Briefe flat text mail | | pay bill, sign contract, invite friend
        der* Buchstabe Buchstaben sign | | underline word, pronounce word""",
    "match": """
        das Spiel Spiele game | stadium | play football, play tennis, visit stadium
        das Streichholz Streichhölzer flat wooden stick fuel | kitchen | light candle, buy candle, need candle""",
    "palm": """
        die Palme Palmen plant | beach garden | go beach, plant tree, water flower
        die Handfläche Handflächen body skin | | wash hand, scratch hand, show hand""",
    "trunk": """
        der Kofferraum Kofferräume opening container | | wash car, repair car, sell car
        der Rüssel Rüssel body | zoo | feed elephant, watch elephant, visit zoo""",
    "pipe": """
        die Pfeife Pfeifen flat wooden stick | | find tobacco, buy tobacco, need tobacco
        das Rohr Rohre metal part | bathroom cellar | repair machine, build house, clean_up bathroom""",
}

# A verb: English[, past] | infinitive, he-form, auxiliary, participle | classes of the subject | complements.
# "*" marks a state, which has no progressive; "pick_up" a particle; "an-rufen" a separable prefix; "sich" a reflexive.
# Complements: acc:CLASSES, dat:CLASSES, ENGLISH=GERMAN+case:CLASSES with prepositions (one may be missing); @CLASSES,
# where it may happen ("@!": it must be said); >CLASSES, where it leads. Without classes, any place.
VERBS = """
sleep slept | schlafen schläft hat geschlafen | person/animal | @
work | arbeiten arbeitet hat gearbeitet | person | @
sit sat | sitzen sitzt hat gesessen | person/animal | @!
go went | gehen geht ist gegangen | person | >far/room/garden/house/bridge/doctor/aunt
run ran | laufen läuft ist gelaufen | person/animal | >far/room/garden/house/bridge/doctor/aunt
drive drove | fahren fährt ist gefahren | person | >far
jump | springen springt ist gesprungen | person/animal | >surface/river
fly flew | fliegen fliegt ist geflogen | flyer | over=über+acc:building
swim swam | schwimmen schwimmt ist geschwommen | person | @!river
swim swam | schwimmen schwimmt ist geschwommen | person | to=zu+dat:shore
arrive | an-kommen kommt ist gekommen | person/vehicle | @!stop
get_up got | auf-stehen steht ist gestanden | person |
wake_up woke | auf-wachen wacht ist gewacht | person/animal |
fall_asleep fell | ein-schlafen schläft ist geschlafen | person/animal | @
come_back came | zurück-kommen kommt ist gekommen | person | from=von+dat:stop
watch_television | fern-sehen sieht hat gesehen | person | @room
begin began | an-fangen fängt hat gefangen | season/game |
grow grew | wachsen wächst ist gewachsen | plant/fingernail |
burn | brennen brennt hat gebrannt | fuel |
read read | lesen liest hat gelesen | person | acc:text @
eat ate | essen isst hat gegessen | person | acc:food @
drink drank | trinken trinkt hat getrunken | person | acc:drink @
drink drank | trinken trinkt hat getrunken | person/animal | from=aus+dat:source
buy bought | kaufen kauft hat gekauft | person | acc:thing/tobacco @market
sell sold | verkaufen verkauft hat verkauft | person | dat:person acc:thing
find* found | finden findet hat gefunden | person | acc:thing/money/tobacco @
need* needed | brauchen braucht hat gebraucht | person | acc:thing/money/tobacco/water
love* | lieben liebt hat geliebt | person | acc:person/season/dog/cat/horse
hate* | hassen hasst hat gehasst | person | acc:season/sport
know* knew | kennen kennt hat gekannt | person | acc:person/story
visit | besuchen besucht hat besucht | person | acc:person/sight
invite | ein-laden lädt hat geladen | person | acc:person
call | an-rufen ruft hat gerufen | person | acc:person/institution
pick_up | ab-holen holt hat geholt | person | acc:friend/guest/child/sister/brother/aunt @stop
help | helfen hilft hat geholfen | person | dat:person
listen | zu-hören hört hat gehört | person | to=+dat:person
belong* | gehören gehört hat gehört | thing | to=+dat:person
follow | folgen folgt ist gefolgt | person/animal | dat:person/animal
wait | warten wartet hat gewartet | person | for=auf+acc:person/vehicle @stop
look_forward | sich freuen freut hat gefreut | person | to=auf+acc:season/game
look | suchen sucht hat gesucht | person | for=+acc:any @
look | an-sehen sieht hat gesehen | person | at=+acc:any
see* saw | sehen sieht hat gesehen | person | acc:any @
draw drew | zeichnen zeichnet hat gezeichnet | person | acc:any @
describe | beschreiben beschreibt hat beschrieben | person | acc:any
forget* forgot | vergessen vergisst hat vergessen | person | acc:any
remember* | sich erinnern erinnert hat erinnert | person | =an+acc:any
think thought | denken denkt hat gedacht | person | of=an+acc:any
talk | sprechen spricht hat gesprochen | person | about=über+acc:any
dream dreamt | träumen träumt hat geträumt | person | of=von+dat:any
open | öffnen öffnet hat geöffnet | person | acc:opening/mail
close | zu-machen macht hat gemacht | person | acc:opening
turn_on | an-machen macht hat gemacht | person | acc:switch
turn_off | aus-machen macht hat gemacht | person | acc:switch
clean_up | auf-räumen räumt hat geräumt | person | acc:room
throw_away threw | weg-werfen wirft hat geworfen | person | acc:thing
bring_along brought | mit-bringen bringt hat gebracht | person | acc:thing
put_on put | an-ziehen zieht hat gezogen | person | acc:garment
hang_up hung | auf-hängen hängt hat gehängt | person | acc:garment/picture
put put | legen legt hat gelegt | person | acc:flat >surface
put put | stellen stellt hat gestellt | person | acc:upright >surface
give gave | geben gibt hat gegeben | person | dat:person acc:thing
show | zeigen zeigt hat gezeigt | person | dat:person acc:thing/hand
lend lent | leihen leiht hat geliehen | person | dat:person acc:flat/device/money
send sent | schicken schickt hat geschickt | person | dat:person acc:mail/document
light lit | an-zünden zündet hat gezündet | person | acc:fuel
repair | reparieren repariert hat repariert | person | acc:device/chair/roof
wash | waschen wäscht hat gewaschen | person | acc:body/garment/animal/car
feed fed | füttern füttert hat gefüttert | person | acc:animal
watch | beobachten beobachtet hat beobachtet | person/animal | acc:animal/person
catch caught | fangen fängt hat gefangen | person | acc:fish
build built | bauen baut hat gebaut | person | acc:building
plant | pflanzen pflanzt hat gepflanzt | person | acc:plant @garden
water | gießen gießt hat gegossen | person | acc:plant
pay paid | bezahlen bezahlt hat bezahlt | person | acc:bill
sign | unterschreiben unterschreibt hat unterschrieben | person | acc:contract
check | prüfen prüft hat geprüft | person | acc:document/machine/part
rob | aus-rauben raubt hat geraubt | person | acc:institution
play | spielen spielt hat gespielt | person | acc:sport @stadium/garden/beach
win won | gewinnen gewinnt hat gewonnen | person | acc:game
bend bent | biegen biegt hat gebogen | person | acc:metal
break broke | zerbrechen zerbricht hat zerbrochen | person | acc:stick/cup/bottle
discover* | entdecken entdeckt hat entdeckt | person | acc:source/sight
pronounce | aus-sprechen spricht hat gesprochen | person | acc:sign/word
underline | unterstreichen unterstreicht hat unterstrichen | person | acc:sign/word
scratch | kratzen kratzt hat gekratzt | person/animal | acc:body
"""

# Verbs that govern a clause with "that", and verbs that govern an infinitive.
THAT_VERBS = """
know* knew | wissen weiß hat gewusst | person |
believe* | glauben glaubt hat geglaubt | person |
hope* | hoffen hofft hat gehofft | person |
say* said | sagen sagt hat gesagt | person |
"""
TO_VERBS = """
hope* | hoffen hofft hat gehofft | person |
try | versuchen versucht hat versucht | person |
forget* forgot | vergessen vergisst hat vergessen | person |
begin began | an-fangen fängt hat gefangen | person |
promise* | versprechen verspricht hat versprochen | person |
"""

# An adjective: English | German | classes of what it describes. With "*" it is too general to tell a sense.
ADJECTIVES = """
old* | alt | person animal thing building opening
new* | neu | thing building vehicle
big* | groß | animal thing building room
small* | klein | animal thing room opening
beautiful* | schön | thing sight garden plant story
cold* | kalt | drink river
young | jung | person animal tree
tired | müde | person animal
hungry | hungrig | person animal
friendly | freundlich | person mail
rich | reich | person institution
modern | modern | institution machine
shy | scheu | animal
rusty | rostig | metal device
bent | verbogen | metal
broken | kaputt | device opening part
wooden | hölzern | wooden
muddy | schlammig | shore river
steep | steil | shore mountain
mild | mild | season
clear | klar | source river
fake | gefälscht | document
pale | blass | fingernail person
Greek | griechisch | sign word
exciting | spannend | game story
wet | nass | fuel garment
tropical | tropisch | plant
sweaty | verschwitzt | skin
wrinkled | faltig | body
empty | leer | container
"""

# Tenses beside present, past and plain: English auxiliary, governing verb; forms of ich, du, er, wir, sie.
MODALS = {
    "can": ("can", "", "kann kannst kann können können"),
    "may": ("may", "", "darf darfst darf dürfen dürfen"),
    "should": ("should", "", "sollte solltest sollte sollten sollten"),
    "will": ("will", "", "werde wirst wird werden werden"),
    "have": ("", "have to", "muss musst muss müssen müssen"),
    "want": ("", "want to", "will willst will wollen wollen"),
    "like": ("would", "like to", "möchte möchtest möchte möchten möchten"),
}
TIMES = {
    "present": ("now|jetzt", "today|heute", "at the moment|im Moment"),
    "plain": ("every day|jeden Tag", "every morning|jeden Morgen", "on Sundays|sonntags", "in summer|im Sommer"),
    "past": ("yesterday|gestern", "last week|letzte Woche", "on Monday|am Montag"),
    "modal": ("tomorrow|morgen", "next week|nächste Woche", "soon|bald", "this evening|heute Abend"),
}
RELATIONS = ("behind|hinter", "in front of|vor", "next to|neben")  # to a landmark
TWO_WAY = {"in", "an", "auf", "hinter", "vor", "neben"}  # dative for a place, accusative for a goal
CONTRACTIONS = {
    **{"in dem": "im", "an dem": "am", "von dem": "vom", "bei dem": "beim"},
    **{"zu dem": "zum", "zu der": "zur", "in das": "ins"},
}
DOUBLED = {"sit", "run", "swim", "get", "put", "rob", "begin", "forget", "win"}  # the last letter: sitting
