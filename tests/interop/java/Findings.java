import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONObject;
import java.io.BufferedReader;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** What is wrong: a count of each kind, and a few examples. */
final class Findings {
    private static final int LONGEST = 300;
    private final int most;
    private final Map<String, Long> counts = new TreeMap<>();
    private final Map<String, List<Map<String, Object>>> examples = new TreeMap<>();

    Findings(int most) {
        this.most = most;
    }

    /** Adds a finding about a row, a number of offsets, or a message; those that do not apply are -1 or null. */
    void add(String kind, int row, MessageQueue queue, long offset, long times, MessageExt message) {
        counts.merge(kind, times, Long::sum);
        List<Map<String, Object>> known = examples.computeIfAbsent(kind, added -> new ArrayList<>());
        if (known.size() == most) {
            return;
        }
        Map<String, Object> example = new LinkedHashMap<>();
        known.add(example);
        if (row >= 0) {
            example.put("row", row);
        }
        if (queue != null) {
            example.put("queue", queue.getTopic() + "/" + queue.getBrokerName() + "/" + queue.getQueueId());
            example.put("offset", offset);
        }
        if (message != null) {
            example.put("logOffset", message.getCommitLogOffset());
            example.put("storeTime", message.getStoreTimestamp());
            example.put("body", shorten(new String(Auditor.bodyOf(message), StandardCharsets.ISO_8859_1)));
            example.put("properties", shorten(message.getProperties().toString()));
        } else if (times > 1) {
            example.put("times", times);
        }
    }

    /** Returns counts and examples, after it has replaced numbers of rows by the rows themselves. */
    Map<String, Object> describe(Path rows) throws IOException {
        Map<Integer, List<Map<String, Object>>> wanted = new HashMap<>();
        examples.values().forEach(few -> few.forEach(example -> {
            if (example.get("row") != null) {
                wanted.computeIfAbsent((Integer) example.get("row"), added -> new ArrayList<>()).add(example);
            }
        }));
        if (!wanted.isEmpty()) {
            try (BufferedReader lines = Files.newBufferedReader(rows, StandardCharsets.US_ASCII)) {
                int number = 0;
                for (String line = lines.readLine(); line != null; line = lines.readLine(), number++) {
                    for (Map<String, Object> example : wanted.getOrDefault(number, List.of())) {
                        JSONObject row = JSON.parseObject(line);
                        example.put("row", row.getString("row"));
                        row.remove("body");
                        example.put("expected", shorten(row.toJSONString()));
                    }
                }
            }
        }
        Map<String, Object> all = new LinkedHashMap<>();
        counts.forEach((kind, count) -> all.put(kind, Map.of("count", count, "examples", examples.get(kind))));
        return all;
    }

    private static String shorten(String text) {
        return text.length() <= LONGEST ? text : text.substring(0, LONGEST) + "...";
    }
}
