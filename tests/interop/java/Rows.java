import com.alibaba.fastjson2.JSONObject;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.Arrays;
import java.util.Collection;
import java.util.HashMap;
import java.util.Map;
import java.util.TreeMap;

/** The rows that writes took, as hashes: less than 100 bytes for each, however long the rows are. */
final class Rows {
    static final int NONE = -1;
    private static final int ANY_BODY = 1;
    private static final int REPEATS = 2;
    private static final int OPTIONAL = 4;

    final int[] copies;
    final int[] topic;
    final int[] queue;
    final int[] order;
    final int[] unit;
    final long[] pairs;
    final long[][] marks;
    final Index[] marked;
    final Map<String, Integer> topics = new HashMap<>();
    final Map<String, Integer> queues = new HashMap<>();
    final Map<String, Integer> orders = new HashMap<>();
    final Map<String, Integer> units = new HashMap<>();
    long required;
    private final long[] body;
    private final int[] tag;
    private final int[] keys;
    private final int[] names;
    private final short[] properties;
    private final byte[] times;
    private final byte[] flags;
    private final Index rows;
    private final Index bodies;
    private int count;

    /** What a message or a row has besides its body. */
    record Fields(int tag, int keys, int names, int properties, long pairs) {
        static Fields of(String tag, String keys, Map<String, ?> properties) {
            Map<String, Object> sorted = new TreeMap<>(properties);
            return new Fields((int) hash(tag), (int) hash(keys), (int) hashAll(sorted.keySet()), sorted.size(),
                hashAll(sorted.entrySet()));
        }

        private static long hashAll(Collection<?> parts) {
            StringBuilder all = new StringBuilder();
            parts.forEach(part -> all.append(part.toString().length()).append(' ').append(part));
            return hash(all.toString());
        }
    }

    Rows(int size, int marks) {
        copies = new int[size];
        topic = new int[size];
        queue = new int[size];
        order = new int[size];
        unit = new int[size];
        pairs = new long[size];
        this.marks = new long[marks][size];
        marked = new Index[marks];
        Arrays.setAll(marked, number -> new Index(size));
        body = new long[size];
        tag = new int[size];
        keys = new int[size];
        names = new int[size];
        properties = new short[size];
        times = new byte[size];
        flags = new byte[size];
        rows = new Index(size);
        bodies = new Index(size);
    }

    int count() {
        return count;
    }

    void add(JSONObject row) {
        int place = count++;
        topic[place] = number(topics, row.getString("topic"));
        queue[place] = number(queues, row.getString("queue"));
        order[place] = number(orders, row.getString("order"));
        unit[place] = number(units, row.getString("unit"));
        JSONObject given = row.getJSONObject("properties");
        Fields fields = Fields.of(row.getString("tag"), row.getString("keys"), given == null ? Map.of() : given);
        tag[place] = fields.tag;
        keys[place] = fields.keys;
        names[place] = fields.names;
        properties[place] = (short) fields.properties;
        pairs[place] = fields.pairs;
        int wanted = row.containsKey("times") ? row.getIntValue("times") : 1;
        times[place] = (byte) wanted;
        boolean optional = row.getBooleanValue("optional");
        required += optional ? 0 : wanted;
        flags[place] = (byte) ((row.getBooleanValue("repeats") ? REPEATS : 0) | (optional ? OPTIONAL : 0));
        if (row.getString("body") == null) {
            flags[place] |= ANY_BODY;
        } else {
            body[place] = hash(Lines.bytes(row, "body"));
            bodies.put(body[place], place);
        }
        if (rows.put(hash(row.getString("row")), place) != place) {
            throw new IllegalArgumentException("two rows have the key " + row.getString("row"));
        }
    }

    int find(String key) {
        return key == null ? NONE : rows.find(hash(key));
    }

    /** Returns the first row with a body. */
    int findBody(byte[] found) {
        return bodies.find(hash(found));
    }

    boolean hasBody(int row, byte[] found) {
        return (flags[row] & ANY_BODY) != 0 || body[row] == hash(found);
    }

    boolean hasTag(int row, Fields found) {
        return tag[row] == found.tag;
    }

    boolean hasKeys(int row, Fields found) {
        return keys[row] == found.keys;
    }

    boolean hasNames(int row, Fields found) {
        return names[row] == found.names;
    }

    int properties(int row) {
        return properties[row];
    }

    int missing(int row) {
        return (flags[row] & OPTIONAL) != 0 ? 0 : Math.max(0, times[row] - copies[row]);
    }

    /** Returns how many copies of a row there are beyond those that its writes stored on purpose. */
    int repeats(int row) {
        return Math.max(0, copies[row] - times[row]);
    }

    boolean mayRepeat(int row) {
        return (flags[row] & REPEATS) != 0;
    }

    static long hash(String text) {
        return text == null ? 0 : hash(text.getBytes(StandardCharsets.UTF_16BE));
    }

    static long hash(byte[] data) {
        try {
            byte[] digest = MessageDigest.getInstance("SHA-256").digest(data);
            return ByteBuffer.wrap(digest).getLong();
        } catch (NoSuchAlgorithmException impossible) {
            throw new IllegalStateException(impossible);
        }
    }

    private static int number(Map<String, Integer> known, String name) {
        return name == null ? NONE : known.computeIfAbsent(name, added -> known.size());
    }

    /** The first row of each hash. */
    static final class Index {
        private final long[] hashes;
        private final int[] places;

        Index(int size) {
            int slots = Integer.highestOneBit(Math.max(1, size)) * 4;
            hashes = new long[slots];
            places = new int[slots];
        }

        int find(long hash) {
            return places[slot(hash)] - 1;
        }

        /** Adds a row, unless the hash has one, and returns the row of the hash. */
        int put(long hash, int place) {
            int slot = slot(hash);
            if (places[slot] == 0) {
                hashes[slot] = hash;
                places[slot] = place + 1;
            }
            return places[slot] - 1;
        }

        private int slot(long hash) {
            int slot = (int) hash & (hashes.length - 1);
            while (places[slot] != 0 && hashes[slot] != hash) {
                slot = (slot + 1) & (hashes.length - 1);
            }
            return slot;
        }
    }
}
